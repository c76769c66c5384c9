/**
 * A dialog in which the leaves of one prompt after the other are judged, by mouse or keyboard.
 *
 * It lies over the page and touches no canvas, so it works with both of ComfyUI's node renderers. The server's state is
 * the truth; only an order that is not sent yet is the page's own.
 */

import { STYLE } from "./human_style.mjs";

const HELP = {
  stars: "Arrows: move. 1 to 5: stars. S: no opinion on this picture. U: undo. Enter: next prompt. Esc: later.",
  pairs: "Which is better? Click it, or 1 for the left and 2 for the right, or arrows and Enter. S: cannot say. U: undo. N: next prompt. Esc: later.",
  rank: "Best first: drag, or Shift and arrows. Arrows: move. Enter: done with this order. S: skip this prompt. U: undo. Esc: later.",
};
const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 };

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export class JudgingDialog {
  /** ``pictureOf(state, leaf)``: address of a picture; ``send(state, answer)``: the new state; ``reload()``: ask anew. */
  constructor({ pictureOf, send, reload }) {
    Object.assign(this, { pictureOf, send, reload, state: null, order: [], shown: "", sending: 0 });
    this.last = Promise.resolve();
    this.title = make("h2");
    this.text = make("p", { className: "prompt" });
    this.gallery = make("div", { className: "gallery" });
    this.help = make("p", { className: "help" });
    this.message = make("p", { className: "message", role: "status", ariaLive: "polite" });
    this.undo = make("button", { textContent: "Undo (U)", onclick: () => this.answer({ kind: "undo" }) });
    this.skip = make("button", { textContent: "Skip (S)", onclick: () => this.skipIt() });
    this.next = make("button", { className: "next", onclick: () => this.goOn() });
    this.later = make("button", { textContent: "Later (Esc)", onclick: () => this.dialog.close() });
    const buttons = make("div", { className: "buttons" }, this.undo, this.skip, this.next, this.later);
    this.dialog = make("dialog", { className: "treegrpo-human", ariaLabel: "Judge pictures" });
    this.dialog.append(this.title, this.text, this.gallery, this.message, this.help, buttons);
    this.dialog.addEventListener("keydown", (event) => this.onKey(event));
    this.dialog.addEventListener("close", () => (this.reminder.hidden = !this.state));
    this.reminder = make("button", {
      className: "treegrpo-human-reminder",
      textContent: "TreeGRPO waits: judge the pictures",
      hidden: true,
      onclick: () => this.open(),
    });
    document.body.append(make("style", { textContent: STYLE }), this.dialog, this.reminder);
    setInterval(() => this.showTime(), 1000);
  }

  /** Show this state of the server; opens the dialog unless it was put aside. */
  show(state) {
    const isNew = this.state?.session !== state.session;
    if (!isNew && state.count < this.state.count) {
      return; // asked for before the last answer, and overtaken by it
    }
    this.state = state;
    this.until = state.seconds_left === null ? null : Date.now() + 1000 * state.seconds_left;
    this.render();
    if (isNew) {
      this.open();
    }
  }

  open() {
    this.reminder.hidden = true;
    if (!this.dialog.open) {
      this.dialog.showModal();
    }
    this.focus(this.focused);
  }

  /** Nothing is left to judge. */
  end() {
    this.state = null;
    this.shown = "";
    this.message.textContent = "";
    this.dialog.close();
    this.reminder.hidden = true;
  }

  render() {
    const { state } = this;
    const place = [state.session, state.prompt, state.pair].join(" ");
    if (place !== this.shown) {
      this.shown = place;
      this.order = state.pair ?? this.keptOrder();
      this.text.textContent = state.text;
      this.help.textContent = HELP[state.mode];
      this.gallery.className = `gallery ${state.mode}`;
      this.skip.textContent = { stars: "No opinion (S)", pairs: "Cannot say (S)", rank: "Skip (S)" }[state.mode];
      this.next.textContent = state.mode === "pairs" ? "Next prompt (N)" : "Next (Enter)";
      this.drawLeaves();
      this.focused = 0;
      if (this.dialog.open) {
        this.focus(0);
      }
    }
    this.undo.disabled = !state.can_undo;
    const pairs = state.mode === "pairs" ? `, pair ${state.asked + 1} of ${state.pairs}` : "";
    this.title.textContent =
      `Update ${state.update + 1} of ${state.run}: prompt ${state.prompt + 1} of ${state.prompts}${pairs}`;
    this.cards().forEach((card, index) => this.label(card, index));
    this.showTime();
  }

  drawLeaves() {
    const cards = this.order.map((leaf) => {
      const picture = make("img", { src: this.pictureOf(this.state, leaf), alt: "", draggable: false });
      const card = make("div", { className: "card", tabIndex: -1 }, picture);
      card.dataset.leaf = leaf;
      card.setAttribute("role", "button");
      card.onclick = () => this.onClick(leaf);
      card.onfocus = () => (this.focused = this.order.indexOf(leaf));
      if (this.state.mode === "stars") {
        card.append(this.starsOf(leaf));
      } else if (this.state.mode === "rank") {
        this.makeDraggable(card, leaf);
      }
      return card;
    });
    this.gallery.replaceChildren(...cards);
  }

  starsOf(leaf) {
    const stars = [1, 2, 3, 4, 5].map((stars) =>
      make("button", {
        tabIndex: -1, // the keyboard has 1 to 5
        textContent: "★",
        ariaLabel: `${stars} stars`,
        onclick: () => this.answer({ kind: "stars", leaf, stars }),
      }),
    );
    return make("div", { className: "stars" }, ...stars);
  }

  makeDraggable(card, leaf) {
    card.draggable = true;
    card.ondragstart = (event) => {
      this.dragged = leaf;
      event.dataTransfer.effectAllowed = "move";
    };
    card.ondragover = (event) => event.preventDefault();
    card.ondrop = (event) => {
      event.preventDefault();
      this.move(this.order.indexOf(this.dragged), this.order.indexOf(leaf));
    };
  }

  label(card, index) {
    const { mode, stars } = this.state;
    const given = mode === "stars" ? stars[this.order[index]] : null;
    const what = { stars: given ? `${given} stars` : "no stars", pairs: "", rank: `place ${index + 1}` }[mode];
    card.setAttribute("aria-label", `Picture ${index + 1} of ${this.order.length} ${what}`.trim());
    card.dataset.place = mode === "rank" ? index + 1 : "";
    card.querySelectorAll(".stars button").forEach((star, at) => star.classList.toggle("on", at < (given ?? 0)));
  }

  showTime() {
    const seconds = this.until === null ? null : Math.max(0, Math.ceil((this.until - Date.now()) / 1000));
    this.dialog.dataset.time = seconds === null ? "" : `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
    this.title.dataset.time = this.dialog.dataset.time;
  }

  cards() {
    return [...this.gallery.children];
  }

  focus(index) {
    const cards = this.cards();
    this.focused = Math.min(Math.max(index, 0), cards.length - 1);
    cards.forEach((card, at) => (card.tabIndex = at === this.focused ? 0 : -1));
    cards[this.focused]?.focus();
  }

  onKey(event) {
    event.stopPropagation(); // or the editor takes the keys for its own shortcuts
    if (event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const onButton = event.target.closest(".buttons") && ["Enter", " "].includes(event.key);
    const act = onButton || event.repeat ? null : this.keys(event)[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  }

  /** What each key does now. */
  keys(event) {
    const { mode } = this.state;
    const keys = { u: () => this.answer({ kind: "undo" }), s: () => this.skipIt(), Enter: () => this.goOn() };
    for (const [key, step] of Object.entries(STEPS)) {
      const target = this.focused + step * (key === "ArrowUp" || key === "ArrowDown" ? this.columns() : 1);
      keys[key] = () => (event.shiftKey && mode === "rank" ? this.move(this.focused, target) : this.focus(target));
    }
    if (mode === "stars") {
      for (const stars of [1, 2, 3, 4, 5]) {
        keys[stars] = () => this.answer({ kind: "stars", leaf: this.order[this.focused], stars });
      }
    } else if (mode === "pairs") {
      Object.assign(keys, { 1: () => this.choose(0), 2: () => this.choose(1), Enter: () => this.choose(this.focused) });
      keys.n = () => this.answer({ kind: "next" });
    }
    return keys;
  }

  columns() {
    const cards = this.cards();
    return cards.filter((card) => card.offsetTop === cards[0].offsetTop).length;
  }

  onClick(leaf) {
    const index = this.order.indexOf(leaf);
    this.focus(index);
    if (this.state.mode === "pairs") {
      this.choose(index);
    }
  }

  choose(index) {
    this.answer({ kind: "choice", better: this.order[index], worse: this.order[1 - index] });
  }

  skipIt() {
    const leaves = this.state.mode === "stars" ? [this.order[this.focused]] : this.order;
    this.answer({ kind: "skip", leaves: [...leaves] });
    if (this.state.mode === "stars") {
      this.focus(this.focused + 1);
    }
  }

  goOn() {
    this.answer(this.state.mode === "rank" ? { kind: "ranking", order: [...this.order] } : { kind: "next" });
  }

  move(from, to) {
    if (from < 0 || to < 0 || to >= this.order.length) {
      return;
    }
    this.order.splice(to, 0, ...this.order.splice(from, 1));
    sessionStorage.setItem(`treegrpo ${this.shown}`, JSON.stringify(this.order));
    this.drawLeaves();
    this.cards().forEach((card, index) => this.label(card, index));
    this.focus(to);
  }

  /** The order as the page had it before it was loaded again, else the leaves' own. */
  keptOrder() {
    const kept = JSON.parse(sessionStorage.getItem(`treegrpo ${this.shown}`) ?? "null");
    return kept ?? Array.from({ length: this.state.leaves }, (_, leaf) => leaf);
  }

  /** Send an answer after those before it. What ends a page is not typed ahead: nobody has seen the next one yet. */
  answer(answer) {
    if (this.sending && this.blocked) {
      return;
    }
    this.blocked = this.state.mode !== "stars" || answer.kind === "next";
    this.sending += 1;
    this.last = this.last.then(() => this.post(answer)).finally(() => (this.sending -= 1));
  }

  async post(answer) {
    if (!this.state) {
      return;
    }
    try {
      this.message.textContent = "";
      const state = await this.send(this.state, answer);
      if (state.prompt === null) {
        this.end();
      } else {
        this.show(state);
      }
    } catch (error) {
      this.message.textContent = error.message;
      await this.reload().catch(() => {}); // no connection: the host's page says so, and asks again when it is back
    }
  }
}
