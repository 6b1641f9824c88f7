// What was said, as a tree: each node is a text of the user or a run of tokens of the model, and branches where the
// model might have said something else. Like a prefix cache, a run is split where a branch leaves it.

let count = 0;

/** A node. `kind` is "root", "user" (`text`, and `prompt`: the token ids of everything up to the answer) or "model"
 * (`tokens`, each {id, logprob, top}; `end`: what is known about its generation once it has ended). */
class Node {
  constructor(parent, kind, fields) {
    Object.assign(this, { key: ++count, parent, kind, children: [], shown: 0 }, fields);
    if (parent) {
      parent.children.push(this);
      parent.shown = parent.children.length - 1;
    }
  }
}

export class Tree {
  constructor() {
    this.root = new Node(null, "root", {});
    this.leaf = this.root;
  }

  /** The tree as JSON holds it, with the tokens' alternatives or without. */
  pack(alternatives = true) {
    const token = ({ id, logprob, top, chosen }) => (
      [id, logprob, alternatives ? top.flatMap((other) => [other.id, other.logprob]) : [], chosen ? 1 : 0]
    );
    const node = ({ kind, text, prompt, tokens, end, children, shown }) => (
      { kind, text, prompt, tokens: tokens?.map(token), end, shown, children: children.map(node) }
    );
    return { root: node(this.root), leaf: this.path().map((each) => each.parent.children.indexOf(each)) };
  }

  /** The tree that was packed. Throws where it was none. */
  static unpack({ root, leaf }) {
    const pairs = (flat) => flat.flatMap((id, i) => (i % 2 ? [] : [{ id, logprob: flat[i + 1] }]));
    const token = ([id, logprob, top, chosen]) => ({ id, logprob, top: pairs(top), ...(chosen && { chosen: true }) });
    const tree = new Tree();
    const grow = (parent, { kind, text, prompt, tokens, end, children, shown }) => {
      const fields = kind === "user" ? { text, prompt } : { tokens: tokens.map(token), end };
      const node = new Node(parent, kind, fields);
      children.forEach((child) => grow(node, child));
      node.shown = shown;
    };
    root.children.forEach((child) => grow(tree.root, child));
    tree.root.shown = root.shown;
    for (const index of leaf) tree.leaf = tree.leaf.children[index];
    return tree;
  }

  /** Every token id that a drawing of the tree needs. */
  get vocabulary() {
    const ids = new Set();
    const visit = ({ tokens = [], children }) => {
      for (const { id, top } of tokens) [id, ...top.map((other) => other.id)].forEach((each) => ids.add(each));
      children.forEach(visit);
    };
    visit(this.root);
    return [...ids];
  }

  /** The nodes from the first to the leaf. */
  path(leaf = this.leaf) {
    const nodes = [];
    for (let node = leaf; node.parent; node = node.parent) nodes.unshift(node);
    return nodes;
  }

  add(parent, kind, fields) {
    this.leaf = new Node(parent, kind, fields);
    return this.leaf;
  }

  /** Removes a node without children; the leaf becomes its parent. */
  remove(node) {
    const { parent } = node;
    parent.children.splice(parent.children.indexOf(node), 1);
    parent.shown = Math.max(0, parent.children.length - 1);
    this.leaf = parent;
  }

  /** Goes to a node, and from there down the way that was last taken. */
  visit(node) {
    for (let child = node; child.parent; child = child.parent) {
      child.parent.shown = child.parent.children.indexOf(child);
    }
    while (node.children.length) node = node.children[node.shown];
    this.leaf = node;
  }

  /** Token ids of everything up to the first `length` tokens of a node, those of the prompt included. */
  ids(node, length = node.tokens?.length ?? 0) {
    const runs = [];
    while (node.kind === "model") {
      runs.unshift(node.tokens.slice(0, length).map(({ id }) => id));
      node = node.parent;
      length = node.tokens?.length ?? 0;
    }
    return [...(node.prompt ?? []), ...runs.flat()];
  }

  /**
   * A branch where the model says `alternative` ({id, logprob}) instead of a node's token number `index`.
   * Returns its node, and whether it is new: a branch that is already there is visited.
   */
  branch(node, index, alternative) {
    const { top } = node.tokens[index];
    const at = index ? this.#split(node, index) : node.parent;
    const there = at.children.find(({ kind, tokens }) => kind === "model" && tokens[0]?.id === alternative.id);
    if (there) {
      this.visit(there);
      return [there, false];
    }
    const tokens = [{ ...alternative, top, chosen: true }];
    return [this.add(at, "model", { tokens, end: null }), true];
  }

  /** Cuts a run in two, of which the second keeps the children. Returns the first. */
  #split(node, index) {
    const { children, shown, tokens, end } = node;
    Object.assign(node, { children: [], tokens: tokens.slice(0, index), end: null });
    const rest = new Node(node, "model", { tokens: tokens.slice(index), end });
    Object.assign(rest, { children, shown });
    for (const child of children) child.parent = rest;
    if (this.leaf === node) this.leaf = rest;
    return node;
  }
}
