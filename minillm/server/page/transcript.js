// The conversation along one path of the tree, its tokens shaded; and the tree itself, drawn.

import { make, parted, percent, spoken, tokenSpan } from "./tokens.js";

const newDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

const seconds = (value) => (value < 10 ? value.toFixed(2) : value.toFixed(0));

/** Tokens per second after the first, or of a search, whose tokens all come at its end, of all its time; "" unless known. */
export function speed({ tokens, first, total, whole }) {
  const [count, time] = whole ? [tokens, total] : [tokens - 1, total - first];
  return count > 0 && time > 0 ? `${(count / time).toFixed(1)} tokens/s` : "";
}

/** The figures of an answer that has ended, in one line. */
export function figures(end) {
  if (!end) return "";
  const { usage, first, tokens, reason } = end;
  const said = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (speed(end)) said.push(speed(end));
  if (first != null && !end.whole) said.push(`first after ${seconds(first)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    said.push(`prompt of ${usage.prompt_tokens}: ${cached} cached, ${usage.prompt_tokens - cached} computed`);
  }
  said.push({ stop: "ended by itself", length: "cut at the limit", stopped: "stopped" }[reason] ?? reason);
  return said.join(" · ");
}

/** Draws the answers token by token. `of` tells which token a span shows: {node, index}. */
export class Transcript {
  #tokens = new WeakMap();
  #decoder = null;

  constructor(scroller, container, vocabulary) {
    Object.assign(this, { scroller, container, vocabulary });
    this.last = null; // the node whose token was drawn last
  }

  of(span) {
    return this.#tokens.get(span);
  }

  spanOf(node, index) {
    return [...this.container.querySelectorAll(".tok")].find((span) => {
      const there = this.of(span);
      return there?.node === node && there.index === index;
    });
  }

  /**
   * Draws a path: a conversation, or one text (`flowing`) of which the model wrote a part. `actions(node)` returns the
   * buttons below the answer that ends with this node.
   */
  draw(path, actions, flowing = false) {
    const follow = this.atEnd();
    const { scrollTop } = this.scroller;
    this.container.replaceChildren();
    this.last = null;
    path.forEach((node, i) => {
      if (node.kind === "user" && !flowing) {
        this.container.append(make("div", { className: "turn user" }, make("p", {}, node.text)));
        return;
      }
      if (i === 0 || (!flowing && path[i - 1].kind !== "model")) this.#begin();
      if (node.kind === "user") {
        this.#decoder = newDecoder();
        this.text.append(make("span", { className: "given" }, node.text));
        return;
      }
      node.tokens.forEach((token, index) => this.#append(node, token, index));
      if (i + 1 === path.length || (!flowing && path[i + 1].kind !== "model")) this.finish(node, actions);
    });
    if (follow) this.toEnd();
    else this.scroller.scrollTop = scrollTop;
  }

  #begin() {
    this.#decoder = newDecoder();
    this.text = make("p", { className: "text" });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer; arrow keys go from token to token");
    this.meta = make("div", { className: "meta" });
    this.container.append(make("div", { className: "turn model" }, this.text, this.meta));
  }

  /** Draws a token that was just generated, and keeps the end in view if it was. */
  append(node, index) {
    const follow = this.atEnd();
    this.#append(node, node.tokens[index], index);
    if (follow) this.toEnd();
  }

  #append(node, token, index) {
    const shown = this.vocabulary.get(token.id);
    const text = shown.special ? "" : this.#decoder.decode(shown.bytes, { stream: true });
    const [spaces, rest] = parted(text);
    const span = tokenSpan(token, rest, shown);
    if (!this.text.querySelector(".tok")) span.tabIndex = 0;
    this.last = node;
    this.#tokens.set(span, { node, index });
    this.text.append(spaces, span);
  }

  /** The line below an answer: its figures, and what can be done now. */
  finish(node, actions) {
    const follow = this.atEnd();
    this.meta.replaceChildren(make("p", {}, figures(node.end)), make("p", { className: "row" }, ...actions(node)));
    if (follow) this.toEnd();
  }

  atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < 48;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** Draws the tree: what follows without a choice stands below, branches are indented; the current path is marked. */
export function drawTree(container, tree, vocabulary, visit) {
  const current = new Set(tree.path());
  const children = (parent) => {
    const branches = parent.children.length > 1;
    const items = parent.children.map((node) => {
      const run = []; // this node and those that follow it without a choice
      for (let at = node; ; [at] = at.children) {
        run.push(at);
        if (at.children.length !== 1) break;
      }
      const last = run.at(-1);
      const item = make("li", { className: branches ? "branch" : "" }, ...run.map(row));
      item.classList.toggle("current", current.has(node));
      if (last.children.length) item.append(children(last));
      return item;
    });
    return make("ul", {}, ...items);
  };
  const row = (node) => {
    const button = make("button", { type: "button", className: `node ${node.kind}` });
    button.classList.toggle("current", current.has(node));
    if (current.has(node)) button.setAttribute("aria-current", node === tree.leaf ? "true" : "step");
    if (node.kind === "user") {
      button.append(make("span", { className: "said" }, node.text.slice(0, 120)));
      button.setAttribute("aria-label", `You: ${node.text.slice(0, 120)}`);
    } else {
      const said = vocabulary.texts(node.tokens.slice(0, 40)).join("").trim();
      const forks = node.parent.children.length > 1 && node.tokens.length;
      const { logprob } = node.tokens[0] ?? {};
      const chance = forks && logprob != null ? percent(Math.exp(logprob)) : "";
      button.append(make("span", { className: "said" }, said || "…"));
      if (chance) button.append(make("span", { className: "figure" }, chance));
      button.setAttribute("aria-label", `Model: ${spoken(said)}${chance && `, first token ${chance}`}`);
    }
    button.addEventListener("click", () => visit(node));
    return button;
  };
  const empty = make("p", { className: "note" }, "Each text and each branch will stand here.");
  container.replaceChildren(tree.root.children.length ? children(tree.root) : empty);
  container.querySelector(".node[aria-current=true]")?.scrollIntoView({ block: "nearest" });
}
