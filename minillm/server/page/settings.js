// The settings of a request: a strategy with its own fields, and what the user changes of it.

import { make } from "./tokens.js";

const STORED = "minillm.settings";

export class Settings {
  /** `strategies` are the model's, of which the first is its own. */
  constructor(form, model) {
    const { strategies } = model;
    Object.assign(this, { form, strategies, model: model.name });
    form.strategy.append(...strategies.map(({ name }) => make("option", { value: name }, name)));
    form.strategy.value = strategies[0].name;
    this.#adopt();
    this.#restore();
    form.strategy.addEventListener("change", () => this.#adopt());
    form.addEventListener("change", () => this.#store());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#adopt(false);
  }

  strategy(name = this.form.strategy.value) {
    return this.strategies.find((each) => each.name === name) ?? this.strategies[0];
  }

  get system() {
    return this.form.system.value.trim();
  }

  /** The field that holds what it may not, as a sentence; "" if there is none. */
  get problem() {
    const wrong = [...this.form.elements].find((field) => !field.disabled && field.validity && !field.validity.valid);
    return wrong ? `${wrong.closest("label").firstChild.textContent.trim()}: ${wrong.validationMessage}` : "";
  }

  /** Fields of a request under the chosen strategy. */
  fields() {
    const { temperature, top_p, top_k, min_p, max_tokens } = this.form;
    const wanted = { ...this.strategy().fields, ...this.#seed(this.strategy()), max_tokens: Number(max_tokens.value) };
    if (!temperature.disabled) wanted.temperature = Number(temperature.value);
    if (!top_p.disabled) {
      for (const name of ["top_p", "top_k", "min_p"]) delete wanted[name];
      if (Number(top_p.value) < 1) wanted.top_p = Number(top_p.value);
      if (Number(top_k.value) > 0) wanted.top_k = Number(top_k.value);
      if (Number(min_p.value) > 0) wanted.min_p = Number(min_p.value);
    }
    return wanted;
  }

  /** Fields of a request under a strategy as it is, with the seed and the length chosen here. */
  fieldsOf(name) {
    const strategy = this.strategy(name);
    return { ...strategy.fields, ...this.#seed(strategy), max_tokens: Number(this.form.max_tokens.value) };
  }

  #seed({ fields }) {
    const { value } = this.form.seed;
    return value === "" || fields.temperature === 0 ? {} : { seed: Number(value) };
  }

  /** Takes over the strategy's own values, and disables what it does not use. */
  #adopt(values = true) {
    const { fields } = this.strategy();
    const { temperature, top_p, top_k, min_p } = this.form;
    if (values) {
      temperature.value = fields.temperature || 1;
      top_p.value = fields.top_p ?? 1;
      top_k.value = fields.top_k ?? 0;
      min_p.value = fields.min_p ?? 0;
    }
    for (const label of this.form.querySelectorAll("[data-sampling]")) {
      const replaced = "filter" in label.dataset && "mirostat" in fields;
      label.querySelector("input").disabled = fields.temperature === 0 || replaced;
    }
  }

  #store() {
    const named = [...this.form.elements].filter(({ name }) => name);
    const values = Object.fromEntries(named.map((each) => [
      each.name, each.type === "checkbox" ? each.checked : each.value,
    ]));
    localStorage.setItem(STORED, JSON.stringify({ ...values, model: this.model }));
  }

  #restore() {
    let values = {};
    try {
      values = JSON.parse(localStorage.getItem(STORED)) ?? {};
    } catch { /* what was stored is not ours: the defaults stay */ }
    const { model, ...rest } = values;
    for (const [name, value] of Object.entries(rest)) {
      const field = this.form.elements[name];
      if (model !== this.model && field?.closest("[data-sampling]") && name !== "seed") continue; // another model's own
      if (field?.type === "checkbox") field.checked = value;
      else if (field) field.value = value;
    }
    if (this.form.strategy.value && model === this.model) return;
    if (!this.form.strategy.value) this.form.strategy.value = this.strategies[0].name;
    this.#adopt();
  }
}
