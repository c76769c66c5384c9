/** Looks of the judging dialog, in the colours of ComfyUI's theme. */

export const STYLE = `
.treegrpo-human {
  box-sizing: border-box; width: 96vw; max-width: 96vw; height: 94vh; max-height: 94vh; padding: 16px;
  border: 1px solid var(--border-color, #555); border-radius: 8px; font: 14px sans-serif;
  background: var(--comfy-menu-bg, #222); color: var(--input-text, #ddd);
}
.treegrpo-human[open] { display: flex; flex-direction: column; gap: 8px; margin: auto; }
.treegrpo-human::backdrop { background: #000a; }
.treegrpo-human h2 { margin: 0; font-size: 16px; display: flex; justify-content: space-between; }
.treegrpo-human h2::after { content: attr(data-time); font-variant-numeric: tabular-nums; }
.treegrpo-human p { margin: 0; }
.treegrpo-human .prompt { font-size: 18px; max-height: 20vh; overflow: auto; }
.treegrpo-human .message { color: #ffb454; min-height: 1.2em; }
.treegrpo-human .gallery {
  flex: 1; min-height: 0; overflow: auto; padding: 4px; display: grid; gap: 10px; align-content: start;
  grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); grid-auto-rows: max-content;
}
.treegrpo-human .gallery.pairs { grid-template-columns: 1fr 1fr; grid-auto-rows: minmax(0, 1fr); align-content: stretch; }
.treegrpo-human .card {
  position: relative; padding: 6px; border-radius: 6px; cursor: pointer; text-align: center;
  background: var(--comfy-input-bg, #333); min-height: 0;
}
.treegrpo-human .card img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; max-height: 62vh; }
.treegrpo-human .pairs .card img { height: 100%; max-height: none; aspect-ratio: auto; }
.treegrpo-human .rank .card { cursor: grab; }
.treegrpo-human .rank .card::after {
  content: attr(data-place); position: absolute; top: 8px; left: 8px; padding: 2px 8px; border-radius: 10px;
  background: #000b; color: #fff; font-weight: bold;
}
.treegrpo-human :focus-visible, .treegrpo-human .card:focus { outline: 3px solid #4aa3ff; outline-offset: 1px; }
.treegrpo-human .stars button {
  border: 0; padding: 0 3px; background: none; color: #777; font-size: 22px; cursor: pointer;
}
.treegrpo-human .stars button.on { color: #ffc83d; }
.treegrpo-human .buttons { display: flex; gap: 8px; flex-wrap: wrap; }
.treegrpo-human .buttons button, .treegrpo-human-reminder {
  padding: 8px 14px; border: 1px solid var(--border-color, #555); border-radius: 6px; cursor: pointer;
  background: var(--comfy-input-bg, #333); color: var(--input-text, #ddd); font: 14px sans-serif;
}
.treegrpo-human .buttons button:disabled { opacity: 0.5; cursor: default; }
.treegrpo-human-reminder {
  position: fixed; bottom: 16px; left: 50%; transform: translateX(-50%); z-index: 9999; border-color: #4aa3ff;
}
.treegrpo-human-reminder[hidden] { display: none; }
`;
