// The panel of one token: its probability, its alternatives, and what it attends to in each layer and head.

import { post } from "./api.js";
import { alternatives, label, make, parted, percent } from "./tokens.js";

const MOST = 1_000_000; // weights fetched at once: of all layers if they are no more, else of one

export class Inspector {
  #abort = null;
  #weights = null; // [layers][heads][positions]
  #choice = { layer: -1, head: -1 }; // -1: the mean

  constructor(container, vocabulary, model) {
    Object.assign(this, { container, vocabulary, model });
    this.clear();
  }

  clear() {
    this.#abort?.abort();
    this.container.replaceChildren(
      make("p", { className: "note" }, "Click a token, or go to it with the arrow keys and press Enter, "
        + "to see its alternatives and what it attends to."),
    );
  }

  /** Shows a token. `ids`: all token ids up to it; `pick` as of `alternatives`. */
  async show(token, ids, pick) {
    this.#abort?.abort();
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    const { text } = this.vocabulary.get(token.id);
    const chance = token.logprob == null ? "" :
      `${percent(Math.exp(token.logprob))}, ${(-token.logprob / Math.LN2 + 0).toFixed(1)} bits of surprise`;
    this.attention = make("div", { className: "attention" }, make("p", { className: "note" }, "Computing …"));
    this.container.replaceChildren(
      make("h3", { className: "token-name" }, label(text)),
      make("p", { className: "note" }, `${chance && `${chance}; `}token ${token.id}, position ${ids.length - 1}`),
      ...(token.top.length ? [
        make("h4", {}, pick ? "Alternatives: click one to branch" : "Alternatives"),
        alternatives(token, this.vocabulary, pick),
      ] : []),
      make("h4", {}, "What it attends to"),
      this.attention,
    );
    const { layers, heads } = this.model;
    this.whole = layers * heads * ids.length <= MOST;
    if (!this.whole && this.#choice.layer < 0) this.#choice.layer = layers >> 1;
    try {
      await this.vocabulary.load(ids, signal);
      await this.#fetch(ids, signal);
      this.#controls(ids, signal);
    } catch (error) {
      if (!signal.aborted) this.attention.replaceChildren(make("p", { className: "note wrong" }, error.message));
    }
  }

  async #fetch(ids, signal) {
    const layer = this.whole ? {} : { layer: this.#choice.layer };
    const body = { model: this.model.name, token_ids: ids, ...layer };
    ({ weights: this.#weights } = await post("inspect/attention", body, signal));
  }

  #controls(ids, signal) {
    const option = (value, text) => make("option", { value }, text);
    const numbers = (count, name) => Array.from({ length: count }, (_, i) => option(i, `${name} ${i}`));
    const select = (key, name, options) => {
      const element = make("select", { id: `attention-${key}` }, ...options);
      element.value = this.#choice[key];
      element.addEventListener("change", async () => {
        this.#choice[key] = Number(element.value);
        try {
          if (key === "layer" && !this.whole) await this.#fetch(ids, signal);
          this.#paint(spans, line);
        } catch (error) {
          if (!signal.aborted) line.textContent = error.message;
        }
      });
      return make("label", {}, `${name} `, element);
    };
    const { layers, heads } = this.model;
    const line = make("p", { className: "note line" });
    const texts = this.vocabulary.texts(ids.map((id) => ({ id })));
    const spaced = [];
    const spans = ids.map((id, i) => {
      const shown = this.vocabulary.get(id);
      const [spaces, rest] = parted(texts[i]);
      const span = make("span", { className: "seen" }, rest);
      spaced.push(spaces, span);
      if (!texts[i]) span.dataset.mark = shown.text;
      span.classList.toggle("special", shown.special);
      return span;
    });
    const flow = make("div", { className: "flow", tabIndex: 0 }, ...spaced);
    flow.setAttribute("role", "img");
    this.flow = flow;
    flow.addEventListener("pointerover", ({ target }) => {
      const i = spans.indexOf(target);
      if (i < 0) return;
      line.replaceChildren(label(this.vocabulary.get(ids[i]).text), ` ${percent(this.row[i])} at position ${i}`);
    });
    flow.addEventListener("pointerleave", () => this.#summary(line));
    this.ids = ids;
    this.attention.replaceChildren(
      make("p", { className: "row" },
        select("layer", "Layer", [...(this.whole ? [option(-1, "all, mean")] : []), ...numbers(layers, "layer")]),
        select("head", "Head", [option(-1, "all, mean"), ...numbers(heads, "head")])),
      flow, line,
    );
    this.#paint(spans, line);
    flow.scrollTop = flow.scrollHeight;
  }

  /** The weights of the chosen layer and head, or their mean; they sum to 1. */
  #row() {
    const { layer, head } = this.#choice;
    const layers = !this.whole ? this.#weights : layer < 0 ? this.#weights : [this.#weights[layer]];
    const rows = layers.flatMap((heads) => (head < 0 ? heads : [heads[head]]));
    return rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
  }

  /** Shades each token by its weight, relative to the largest after the first token, which often holds most. */
  #paint(spans, line) {
    this.row = this.#row();
    const most = Math.max(...this.row.slice(1), 1e-9);
    spans.forEach((span, i) => {
      const weight = spans.length > 1 ? this.row[i] / most : 1;
      span.style.setProperty("--weight", Math.min(1, weight).toFixed(3));
    });
    this.#summary(line);
  }

  #summary(line) {
    const order = this.row.map((_, i) => i).sort((a, b) => this.row[b] - this.row[a]).slice(0, 3);
    const text = (i) => this.vocabulary.get(this.ids[i]).text;
    const said = order.map((i) => `${text(i).trim()} ${percent(this.row[i])}`).join(", ");
    line.replaceChildren("Most: ", ...order.flatMap((i) => [label(text(i)), ` ${percent(this.row[i])} `]));
    this.flow.setAttribute("aria-label", `Attention over ${this.ids.length} tokens. Most: ${said}`);
  }
}
