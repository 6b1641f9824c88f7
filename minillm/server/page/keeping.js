// What was said, kept in this browser over a reload; and taken along: copied, or saved as Markdown or JSON.

import { Tree } from "./tree.js";

const STORED = "minillm.said";
const MOST = 2_000_000; // characters; browsers hold about five million for a site

/** The trees of one model ({chat, completion}), by a name that changes with its vocabulary. */
export class Keeper {
  constructor(model) {
    this.name = `${model.name} ${model.layers} ${model.heads} ${model.vocabulary}`;
  }

  /** The stored trees. What is not ours, or cannot be read, is none. */
  load() {
    try {
      const { chat, completion } = JSON.parse(localStorage.getItem(STORED))[this.name];
      return { chat: Tree.unpack(chat), completion: Tree.unpack(completion) };
    } catch {
      return { chat: new Tree(), completion: new Tree() };
    }
  }

  /** Stores trees; other models' and then alternatives are left out where they are too many. Returns whether it could. */
  store({ chat, completion }) {
    const pack = (alternatives) => ({ [this.name]: { chat: chat.pack(alternatives), completion: completion.pack(alternatives) } });
    for (const value of [() => ({ ...others(this.name), ...pack(true) }), () => pack(true), () => pack(false)]) {
      try {
        const text = JSON.stringify(value());
        if (text.length > MOST) continue;
        localStorage.setItem(STORED, text);
        return true;
      } catch { /* no room, or no storage: with less, perhaps */ }
    }
    return false;
  }
}

function others(name) {
  try {
    const { [name]: own, ...rest } = JSON.parse(localStorage.getItem(STORED)) ?? {};
    return rest;
  } catch {
    return {};
  }
}

/** The messages along a path: what the user and the model said, each [{role, content}]. */
export function messagesOf(path, vocabulary, system = "") {
  const messages = system ? [{ role: "system", content: system }] : [];
  const tokens = []; // of the answer that grows: a character may be cut by two runs of tokens
  const end = () => {
    if (tokens.length) messages.push({ role: "assistant", content: vocabulary.texts(tokens.splice(0)).join("") });
  };
  for (const node of path) {
    if (node.kind === "model") {
      tokens.push(...node.tokens);
    } else {
      end();
      messages.push({ role: "user", content: node.text });
    }
  }
  end();
  return messages;
}

const SPEAKERS = { system: "System", user: "You", assistant: "Model" };

/** Messages as Markdown; of a continued text the text alone. */
export function markdownOf(messages, chat) {
  if (!chat) return `${messages.map(({ content }) => content).join("")}\n`;
  return messages.map(({ role, content }) => `## ${SPEAKERS[role]}\n\n${content.trim()}\n`).join("\n");
}

/** Copies a text. Returns whether the browser did. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no secure context: the old way
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "sr";
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

/** Hands a text to the browser as a file to save. */
export function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
