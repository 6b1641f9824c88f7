// The panel of one token: its probability, its alternatives, the distribution that it was chosen from before and after
// each step of the settings, and what it attends to in each layer and head.

import { post } from "./api.js";
import { alternatives, label, make, parted, percent } from "./tokens.js";

const MOST = 1_000_000; // weights fetched at once: of all layers if they are no more, else of one

export class Inspector {
  #abort = null;
  #weights = null; // [layers][heads][positions]
  #choice = { layer: -1, head: -1 }; // -1: the mean

  /** `fields()`: those of a request under the present settings. */
  constructor(container, vocabulary, model, fields) {
    Object.assign(this, { container, vocabulary, model, fields });
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
    const steps = make("div", { className: "steps" }, make("p", { className: "note" }, "Computing …"));
    this.container.replaceChildren(
      make("h3", { className: "token-name" }, label(text)),
      make("p", { className: "note" }, `${chance && `${chance}; `}token ${token.id}, position ${ids.length - 1}`),
      ...(token.top.length ? [
        make("h4", {}, pick ? "Alternatives: click one to branch" : "Alternatives"),
        alternatives(token, this.vocabulary, pick),
      ] : []),
      ...(ids.length > 1 ? [make("h4", {}, "How the present settings choose here"), steps] : []),
      make("h4", {}, "What it attends to"),
      this.attention,
    );
    if (ids.length > 1) this.#steps(steps, token, ids.slice(0, -1), signal);
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

  /** Fills in the probabilities of the likeliest tokens after `ids`, a column for each step. */
  async #steps(container, token, ids, signal) {
    try {
      const { max_tokens, ...fields } = this.fields();
      const body = { ...fields, model: this.model.name, prompt: ids };
      const { token_ids, greedy, steps } = await post("inspect/steps", body, signal);
      await this.vocabulary.load(token_ids, signal);
      const row = (head, cells, own = false) => make("tr", { className: own ? "own" : "" },
        make("th", { scope: "row" }, head), ...cells.map((cell) => make("td", {}, cell)));
      const chance = (value) => (value ? percent(value) : "–");
      const table = make("table", {},
        make("thead", {}, make("tr", {}, make("td"), ...steps.map(({ name }) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...token_ids.map((id, i) => row(label(this.vocabulary.get(id).text),
          steps.map(({ probabilities }) => chance(probabilities[i])), id === token.id))),
        make("tfoot", {},
          row("tokens left", steps.map(({ tokens_left }) => tokens_left.toLocaleString("en"))),
          row("entropy, bits", steps.map(({ entropy }) => (entropy / Math.LN2 + 0).toFixed(2)))));
      const scrolls = make("div", { className: "scrolls", tabIndex: 0 }, table);
      scrolls.setAttribute("role", "region");
      scrolls.setAttribute("aria-label", "Probabilities before and after each step");
      container.replaceChildren(scrolls, make("p", { className: "note" },
        greedy ? "The likeliest of the last column is taken." : "The token is drawn from the last column."));
    } catch (error) {
      if (!signal.aborted) container.replaceChildren(make("p", { className: "note" }, error.message));
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
