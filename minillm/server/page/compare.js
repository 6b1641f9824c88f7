// One prompt under two strategies, side by side.

import { make, percent } from "./tokens.js";
import { Transcript } from "./transcript.js";

/** One side: a strategy, its answer and its figures. */
class Side {
  constructor(app, name, number) {
    this.app = app;
    const options = app.settings.strategies.map((each) => make("option", { value: each.name }, each.name));
    this.select = make("select", {}, ...options);
    this.select.value = name;
    this.select.setAttribute("aria-label", `Strategy ${number}`);
    this.said = make("div", { className: "said" });
    this.mean = make("p", { className: "mean" });
    this.fields = make("code", { className: "fields" });
    this.select.addEventListener("change", () => this.#describe());
    this.#describe();
    const header = make("header", {}, this.select, this.fields);
    this.element = make("section", { className: "side" }, header, this.said, this.mean);
    this.element.setAttribute("aria-label", `Strategy ${number}`);
    this.transcript = new Transcript(this.said, this.said, app.vocabulary);
  }

  #describe() {
    const { fields } = this.app.settings.strategy(this.select.value);
    this.fields.textContent = Object.entries(fields).map(([name, value]) => `${name} ${value}`).join(", ");
  }

  async run(prompt, signal) {
    const { model, settings } = this.app;
    const node = { kind: "model", tokens: [], end: null, prompt };
    this.mean.textContent = "";
    this.transcript.draw([node], () => []);
    const fields = settings.fieldsOf(this.select.value);
    const late = await this.app.generate(node, prompt, { ...fields, model: model.name }, signal, () => {
      this.transcript.append(node, node.tokens.length - 1);
    });
    if (late) this.transcript.draw([node], () => []);
    this.transcript.finish(node, () => []);
    if (!node.tokens.length) return;
    const sum = node.tokens.reduce((total, { logprob }) => total + logprob, 0);
    const average = percent(Math.exp(sum / node.tokens.length));
    this.mean.textContent = `log p ${sum.toFixed(2).replace("-", "−")} · an average token has ${average}`;
  }
}

export class Compare {
  constructor(container, app) {
    this.app = app;
    this.sides = [new Side(app, "greedy search", 1), new Side(app, app.settings.strategies[0].name, 2)];
    container.append(...this.sides.map(({ element }) => element));
  }

  /** Runs both sides at once. Throws the first error. */
  async run(prompt, signal) {
    const ends = await Promise.allSettled(this.sides.map((side) => side.run(prompt, signal)));
    const failed = ends.find(({ status }) => status === "rejected");
    if (failed) throw failed.reason;
  }

  /** The side and token that a span shows. */
  of(span) {
    for (const { transcript } of this.sides) if (transcript.of(span)) return transcript.of(span);
    return undefined;
  }
}
