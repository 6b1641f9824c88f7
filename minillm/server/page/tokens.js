// How tokens are drawn: a token, the list of its alternatives, and the card that shows this list. Shades: tokens.css.

/** An element with properties and children. Text is always set as text: nothing the model says becomes markup. */
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export function percent(probability) {
  const value = 100 * probability;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** A token's text as a label, its white space visible. */
export function label(text) {
  const parts = text.split(/([ \n\t\r])/).filter(Boolean);
  return make("code", {}, ...parts.map((part) => (SIGNS[part] ? make("i", { className: "sign" }, SIGNS[part]) : part)));
}

/** A token's text for those who listen. */
export function spoken(text) {
  return text.replaceAll("\n", " line break ").trim() || "space";
}

/** A text in two parts: the spaces that it begins with, which stay without a shade, and the rest. */
export function parted(text) {
  const spaces = text.match(/^ *(?=\S)/)?.[0] ?? "";
  return [spaces, text.slice(spaces.length)];
}

/** A token of an answer: text that is shaded, can be pointed at and focused. */
export function tokenSpan(token, text, shown) {
  const span = make("span", { className: "tok", tabIndex: -1 }, text);
  span.setAttribute("role", "button");
  const chance = token.logprob == null ? "" : `, ${percent(Math.exp(token.logprob))}`;
  span.setAttribute("aria-label", `${spoken(shown.text)}${chance}`);
  span.style.setProperty("--logprob", (token.logprob ?? 0).toFixed(3));
  if (!text) span.dataset.mark = shown.text; // drawn by the style sheet, so never copied
  span.classList.toggle("special", shown.special);
  span.classList.toggle("chosen", Boolean(token.chosen));
  return span;
}

/**
 * The alternatives of a token as a list, best first, the token itself marked; where it is not among the best, it comes
 * last. `pick(alternative)` is called for one that is clicked; without it the list is only shown.
 */
export function alternatives(token, vocabulary, pick) {
  const rows = token.top.some(({ id }) => id === token.id) ? token.top : [...token.top, token];
  const items = rows.map((row) => {
    const { text } = vocabulary.get(row.id);
    const own = row.id === token.id;
    const chance = row.logprob == null ? "" : percent(Math.exp(row.logprob));
    const bar = make("span", { className: "bar" });
    bar.style.setProperty("--share", row.logprob == null ? 0 : Math.exp(row.logprob).toFixed(4));
    const parts = [label(text), bar, make("span", { className: "figure" }, chance)];
    if (own || !pick) return make("li", { className: own ? "own" : "" }, make("span", { className: "row" }, ...parts));
    const button = make("button", { type: "button", className: "row" }, ...parts);
    button.setAttribute("aria-label", `Branch with ${spoken(text)}, ${chance}`);
    button.addEventListener("click", () => pick(row));
    return make("li", {}, button);
  });
  return make("ol", { className: "alternatives" }, ...items);
}

/** The card beside a token under the pointer or with the focus. */
export class Card {
  #timer = 0;

  constructor(element) {
    this.element = element;
    this.span = null;
    element.addEventListener("pointerenter", () => clearTimeout(this.#timer));
    element.addEventListener("pointerleave", () => this.hide(150));
  }

  /** Shows the card for a token's span after a delay. `fill` returns its contents. */
  show(span, fill, delay = 0) {
    clearTimeout(this.#timer);
    if (span === this.span) return;
    this.#timer = setTimeout(() => {
      if (!span.isConnected) return;
      this.span?.classList.remove("pointed");
      this.span = span;
      span.classList.add("pointed");
      this.element.replaceChildren(...fill());
      this.element.hidden = false;
      this.#place(span.getClientRects()[0]);
    }, delay);
  }

  hide(delay = 0) {
    clearTimeout(this.#timer);
    const hide = () => {
      this.span?.classList.remove("pointed");
      this.span = null;
      this.element.hidden = true;
    };
    if (delay) this.#timer = setTimeout(hide, delay);
    else hide();
  }

  /** Below the token, or above it where there is no room, and inside the window. */
  #place(token) {
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const below = token.bottom + 6;
    const top = below + height > innerHeight - 8 ? token.top - height - 6 : below;
    const left = Math.min(Math.max(8, token.left - 12), innerWidth - width - 8);
    this.element.style.setProperty("left", `${left}px`);
    this.element.style.setProperty("top", `${Math.max(8, top)}px`);
  }
}

/** Arrow keys move the focus between the tokens. */
export function roving(container) {
  container.addEventListener("keydown", (event) => {
    const at = event.target.closest?.(".tok");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!at || !step) return;
    const all = [...container.querySelectorAll(".tok")];
    const next = all[all.indexOf(at) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}
