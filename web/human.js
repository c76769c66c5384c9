/** The browser's side of TreeGRPO Human Reward: fetches what is to be judged, shows it, sends the answers. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { JudgingDialog } from "./human_dialog.mjs";

const ROUTE = "/treegrpo/human";

async function request(path, body) {
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  const reply = await api.fetchApi(ROUTE + path, options);
  const data = await reply.json();
  if (!reply.ok) {
    throw new Error(data.error);
  }
  return data;
}

const pictureOf = (state, leaf) => api.apiURL(`${ROUTE}/${state.session}/${state.prompt}/${leaf}`);

/** Sends one answer to what ``state`` shows; returns the new state. */
async function send(state, answer) {
  const { session, run, update, prompt_id, count } = state;
  return request(`/${session}`, { run, update, prompt_id, count, answer });
}

/** Shows whatever the server waits for, or nothing. */
async function refresh(dialog) {
  const [state] = await request("");
  if (state) {
    dialog.show(state);
  } else {
    dialog.end();
  }
}

const extension = {
  name: "treegrpo.human",
  setup() {
    const dialog = new JudgingDialog({ pictureOf, send, reload: () => refresh(dialog) });
    api.addEventListener("treegrpo.human", () => refresh(dialog));
    api.addEventListener("reconnected", () => refresh(dialog));
    return refresh(dialog); // a page that was loaded again goes on where it was
  },
};

// The host serves this file under the pack's name and under its folder's, and the page loads both.
if (!window.treegrpoHuman) {
  window.treegrpoHuman = true;
  app.registerExtension(extension);
}
