// The page: what its parts do when something is clicked, sent, streamed or stopped.

import { ApiError, Vocabulary, continuation, get, onMissingKey, post, scored } from "./api.js";
import { Compare } from "./compare.js";
import { Inspector } from "./inspector.js";
import { Keeper, copy, markdownOf, messagesOf, save } from "./keeping.js";
import { Settings } from "./settings.js";
import { Card, alternatives, make, percent, roving } from "./tokens.js";
import { Transcript, drawTree, figures, speed } from "./transcript.js";
import { Tree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 64rem)");
const IDEAS = {
  chat: ["Give me the first five prime numbers.", "Why is the sky blue?", "Write two lines about rain."],
  completion: ["Once upon a time", "A list of colors: red,", "The capital of France is"],
  compare: [],
};

const app = { model: null, settings: null, vocabulary: null, generate, mode: "completion" };
const trees = { chat: new Tree(), completion: new Tree() };
let tree = trees.completion;
let running = null; // AbortController of what is being generated
let transcript, inspector, compare, card, keeper;

// --- starting --------------------------------------------------------------------------------------------------------

async function start() {
  theme(localStorage.getItem("minillm.theme"));
  onMissingKey(askForKey);
  listen();
  try {
    const named = new URLSearchParams(location.search).get("model");
    const query = named === null ? "" : `?model=${encodeURIComponent(named)}`; // a model of a folder is loaded for it
    const { models } = await get(`inspect/models${query}`);
    app.model = models.find(({ name }) => name === named) ?? models[0];
    $("model-choice").classList.toggle("hidden", models.length < 2);
    $("model").hidden = models.length > 1;
    $("model-select").append(...models.map(({ name }) => make("option", { value: name }, name)));
    $("model-select").value = app.model.name;
  } catch (error) {
    fail(error);
    return;
  }
  const { model } = app;
  $("model").textContent = model.name;
  $("model").title = `${model.layers} layers of ${model.heads} heads, context of ${model.context} tokens, `
    + `vocabulary of ${model.vocabulary}`;
  app.settings = new Settings($("settings"), model);
  app.vocabulary = new Vocabulary(model.name);
  transcript = new Transcript($("transcript"), $("said"), app.vocabulary);
  inspector = new Inspector($("token"), app.vocabulary, model, () => app.settings.fields());
  compare = new Compare($("compare"), app);
  $("chat-choice").hidden = !model.chat; // without a template it only continues texts
  document.body.classList.toggle("shaded", app.settings.form.shade.checked);
  await restore();
  mode(model.chat ? "chat" : "completion");
  $("prompt").disabled = false;
  if (wide.matches) $("prompt").focus();
  load();
}

/** What was said before the page was loaded anew. */
async function restore() {
  keeper = new Keeper(app.model);
  const kept = keeper.load();
  try {
    await app.vocabulary.load([...kept.chat.vocabulary, ...kept.completion.vocabulary]);
    Object.assign(trees, kept);
    for (const { leaf } of Object.values(kept)) { // was asked, and not yet answered
      if (leaf.kind !== "user") continue;
      $("prompt").value = leaf.text;
      (kept.chat.leaf === leaf ? kept.chat : kept.completion).remove(leaf);
    }
  } catch (error) {
    fail(error);
  }
}

/** Keeps what was said, as far as there is room. */
function keep() {
  if (!keeper.store(trees)) $("live").textContent = "too long to be kept over a reload";
}

/** What was said on the current path, for other programs. */
function taken() {
  const chat = app.mode === "chat";
  const messages = messagesOf(tree.path(), app.vocabulary, chat ? app.settings.system : "");
  return { chat, messages };
}

function takeAsJson() {
  const { chat, messages } = taken();
  const said = chat ? { messages } : { text: messages.map(({ content }) => content).join("") };
  const about = { model: app.model.name, saved: new Date().toISOString(), settings: app.settings.fields() };
  save("conversation.json", "application/json", `${JSON.stringify({ ...about, ...said, tree: tree.pack() }, null, 1)}\n`);
}

function takeAsMarkdown() {
  const { chat, messages } = taken();
  save("conversation.md", "text/markdown", markdownOf(messages, chat));
}

/** Copies a text, and says so on the button. */
async function copyBy(button, text) {
  const name = button.textContent;
  button.textContent = await copy(text) ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = name), 1500);
}

/** Switches between conversation, continued text and comparison; each keeps what was said in it. */
function mode(name) {
  stop();
  app.mode = name;
  document.body.dataset.mode = name;
  document.querySelector(`[name=mode][value=${name}]`).checked = true;
  $("prompt").placeholder = {
    chat: "Say something",
    completion: "A text to continue",
    compare: app.model.chat ? "A message to answer" : "A text to continue",
  }[name];
  $("system").hidden = !app.model.chat || name === "completion";
  $("compare").hidden = name !== "compare";
  $("transcript").hidden = name === "compare";
  $("ideas").replaceChildren(...IDEAS[name].map((text) => {
    const idea = make("button", { type: "button" }, text);
    idea.addEventListener("click", () => {
      $("prompt").value = text;
      submit();
    });
    return make("li", {}, idea);
  }));
  tree = trees[name] ?? tree;
  inspector.clear();
  draw();
}

// --- what was said ---------------------------------------------------------------------------------------------------

/** Draws everything anew for the current path. */
function draw() {
  card.hide();
  const path = tree.path();
  $("welcome").hidden = path.length > 0 || app.mode === "compare";
  transcript.draw(path, actions, app.mode === "completion");
  drawAround();
}

/** Draws the tree and what the button says. */
function drawAround() {
  drawTree($("tree"), tree, app.vocabulary, (node) => {
    if (running) return;
    tree.visit(node);
    draw();
    keep();
    if (!wide.matches) panel("tree", false);
    transcript.spanOf(node, 0)?.scrollIntoView({ block: "center" });
  });
  $("take").hidden = tree.leaf === tree.root;
  button();
}

/** The buttons below an answer. */
function actions(node) {
  if (running) return [];
  const act = (name, does) => {
    const element = make("button", { type: "button", className: "quiet" }, name);
    element.addEventListener("click", () => does(element));
    return element;
  };
  const text = () => messagesOf(tree.path(node), app.vocabulary).at(-1).content.trim();
  const buttons = [act("Try again", () => answerAgain(node)), act("Copy", (element) => copyBy(element, text()))];
  if (node.end?.reason !== "stop") buttons.unshift(act("Continue", () => answer(node)));
  return buttons;
}

/** Sends the text, or continues the answer where there is none. */
async function submit() {
  if (running) return stop();
  const text = $("prompt").value;
  if (!app.model || (!text.trim() && (app.mode !== "completion" || tree.leaf.kind !== "model"))) return;
  if (app.settings.problem) return fail(new ApiError(app.settings.problem));
  if (app.mode === "compare") return sides(text);
  if (!text.trim()) return answer(tree.leaf);
  const home = tree; // another may be shown before this has ended
  await during(async (signal) => {
    const prompt = await promptIds(text, signal);
    const user = home.add(home.leaf, "user", { text, prompt });
    $("prompt").value = "";
    grow();
    try {
      await generateBelow(user, signal);
    } finally {
      if (user.children.length === 0) { // it failed at once: nothing was said
        home.remove(user);
        $("prompt").value = text;
      }
    }
  });
}

/** Token ids of the text so far with what the user adds. */
async function promptIds(text, signal) {
  const model = app.model.name;
  if (app.model.chat && app.mode !== "completion") {
    const messages = app.settings.system ? [{ role: "system", content: app.settings.system }] : [];
    for (const node of app.mode === "chat" ? tree.path() : []) {
      if (node.kind === "user") messages.push({ role: "user", content: node.text });
      else if (node.parent.kind === "model") messages.at(-1).tokens.push(...node.tokens);
      else messages.push({ role: "assistant", tokens: [...node.tokens] });
    }
    const said = messages.map(({ role, content, tokens }) => (
      { role, content: content ?? app.vocabulary.texts(tokens).join("") }
    ));
    said.push({ role: "user", content: text });
    return (await post("tokenize", { model, messages: said, add_generation_prompt: true }, signal)).tokens;
  }
  const before = app.mode === "compare" ? [] : tree.ids(tree.leaf);
  const { tokens } = await post("tokenize", { model, prompt: text, add_special_tokens: before.length === 0 }, signal);
  return [...before, ...tokens];
}

/** Generates an answer that continues a node's tokens. */
function answer(node) {
  return during((signal) => generateBelow(node, signal));
}

/** Another answer to the same text of the user. */
function answerAgain(node) {
  let first = node;
  while (first.parent.kind === "model") first = first.parent;
  return answer(first.parent);
}

/** Says an alternative instead of a token, and goes on from there. */
function branch(node, index, alternative) {
  if (running) return;
  card.hide();
  const [there, fresh] = tree.branch(node, index, alternative);
  inspector.clear();
  draw();
  if (!wide.matches) panel("side", false);
  if (fresh) during((signal) => generateInto(there, signal));
  transcript.spanOf(there, 0)?.focus();
}

/** A node below this one: the next tokens of the same answer if it is the model's, else its answer. */
async function generateBelow(parent, signal) {
  const home = tree;
  const node = home.add(parent, "model", { tokens: [], end: null });
  try {
    await generateInto(node, signal);
  } finally {
    if (!node.tokens.length) home.remove(node);
  }
}

async function generateInto(node, signal) {
  draw();
  transcript.toEnd();
  const fields = { ...app.settings.fields(), model: app.model.name };
  const late = await generate(node, tree.ids(node), fields, signal, () => {
    transcript.append(node, node.tokens.length - 1);
  });
  if (late) draw();
}

/**
 * Appends what the model says after `ids` to a node, calling `drawn` after each token; then sets its `end`. Returns
 * whether the tokens got their alternatives late, and are to be drawn anew.
 */
async function generate(node, ids, fields, signal, drawn) {
  const room = app.model.context - ids.length;
  fields.max_tokens = Math.max(1, Math.min(fields.max_tokens, room));
  const began = performance.now();
  const clock = () => (performance.now() - began) / 1000;
  const end = { usage: null, first: null, total: 0, tokens: 0, reason: "stopped", whole: fields.num_beams > 1 };
  try {
    for await (const { tokens, finish, usage } of continuation(ids, fields, signal)) {
      if (tokens.length) {
        await app.vocabulary.load(tokens.flatMap((token) => [token.id, ...token.top.map(({ id }) => id)]), signal);
        end.first ??= clock();
      }
      for (const token of tokens) {
        node.tokens.push(token);
        end.tokens += 1;
        drawn();
      }
      end.total = clock();
      end.reason = finish ?? end.reason;
      if (usage) {
        end.usage = usage;
        asked.prompt += usage.prompt_tokens;
        asked.cached += usage.prompt_tokens_details?.cached_tokens ?? 0;
      } else if (app.mode !== "compare") {
        live(end);
      }
    }
    return await addAlternatives(node, ids, signal);
  } catch (error) {
    if (!signal.aborted) {
      end.reason = "ended by an error";
      throw error;
    }
    return false;
  } finally {
    node.end = end;
  }
}

/** The alternatives of tokens that a search gave without, from one more pass over the text. Returns whether it ran. */
async function addAlternatives(node, ids, signal) {
  const fresh = node.tokens.filter(({ top }) => !top.length);
  if (!fresh.length) return false;
  const positions = await scored(app.model.name, [...ids, ...fresh.map(({ id }) => id)], signal);
  await app.vocabulary.load(positions.flatMap(({ top }) => top.map(({ id }) => id)), signal);
  node.tokens.splice(-fresh.length, fresh.length, ...positions.slice(ids.length));
  return true;
}

/** Runs something that generates, with Stop in place of Send; its failure is shown in one line. */
async function during(generating) {
  if (running) return;
  running = new AbortController();
  fail(null);
  button();
  load();
  try {
    await generating(running.signal);
  } catch (error) {
    if (!running.signal.aborted) fail(error);
  } finally {
    running = null;
    load();
    const end = app.mode === "compare" ? null : tree.leaf.end;
    if (app.mode === "compare") {
      button();
    } else if (end && transcript.last === tree.leaf) { // all is drawn, and the focus stays where it is
      transcript.finish(tree.leaf, actions);
      drawAround();
    } else {
      draw();
    }
    live(null);
    keep();
    $("said-aloud").textContent = end ? `The answer is there: ${figures(end)}` : "It has ended.";
  }
}

function stop() {
  running?.abort();
}

function sides(text) {
  return during(async (signal) => {
    card.hide();
    await compare.run(await promptIds(text, signal), signal);
  });
}

// --- what is shown beside --------------------------------------------------------------------------------------------

function button() {
  const continues = app.mode === "completion" && tree.leaf.kind === "model" && !$("prompt").value.trim();
  $("send").classList.toggle("running", running !== null);
  $("send").querySelector(".go").textContent = continues ? "Continue" : app.mode === "compare" ? "Compare" : "Send";
}

const asked = { prompt: 0, cached: 0 }; // tokens of all prompts of this visit

/** While something is generated its speed; then how much of all prompts was found in the prefix cache. */
function live(end) {
  if (end) {
    const { first } = end;
    $("live").textContent = first == null ? "" : `first token after ${first.toFixed(2)} s${speed(end) && ` · ${speed(end)}`}`;
  } else if (asked.prompt) {
    $("live").textContent = `${asked.cached} of ${asked.prompt} prompt tokens were cached`;
  }
}

/** Fits the field's height to its text, in browsers whose style sheets cannot. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

let loading = 0;

/** Shows how much of the K/V cache is in use: now, and again while something runs. */
async function load() {
  clearTimeout(loading);
  try {
    const found = await get(`inspect/load?model=${encodeURIComponent(app.model.name)}`);
    const { free_pages: free, cached_pages: kept, total_pages: total, running: now, waiting } = found;
    $("cache-used").style.setProperty("--share", (1 - free / total).toFixed(4));
    $("cache-kept").style.setProperty("--share", (kept / total).toFixed(4));
    $("cache-figure").textContent = percent(1 - (free - kept) / total);
    $("cache").title = `K/V cache: of ${total} pages ${total - free} are in use, and ${kept} kept for prompts that `
      + `begin alike; ${now} running, ${waiting} waiting`;
  } catch { /* the next request says what is wrong */ }
  if (running) {
    keep(); // a reload in the middle loses little
    loading = setTimeout(load, 700);
  }
}

function fail(error) {
  $("error").textContent = error ? error.message : "";
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
}

/** Shows or hides a panel that is not always there. */
function panel(name, open) {
  $(`${name}-panel`).classList.toggle("open", open);
  $(`show-${name}`).setAttribute("aria-expanded", open);
  $("veil").hidden = !document.querySelector(".panel.open");
}

function tab(name) {
  for (const each of ["token", "settings"]) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
}

function askForKey(message) {
  $("key-error").textContent = message;
  $("key").value = "";
  $("key-dialog").showModal();
  return new Promise((resolve) => {
    $("key-form").onsubmit = () => resolve($("key").value.trim());
    $("key-dialog").oncancel = $("key-cancel").onclick = () => {
      $("key-dialog").close();
      resolve(null);
    };
  });
}

// --- listening -------------------------------------------------------------------------------------------------------

/** The token of a span and what can be done with it, in the conversation or in a comparison. */
function tokenAt(span) {
  const there = transcript?.of(span) ?? compare?.of(span);
  if (!there) return null;
  const { node, index } = there;
  const pick = app.mode === "compare" || running ? null : (alternative) => branch(node, index, alternative);
  const said = node.tokens.slice(0, index + 1).map(({ id }) => id);
  const ids = app.mode === "compare" ? [...node.prompt, ...said] : tree.ids(node, index + 1);
  return { token: node.tokens[index], pick, ids };
}

function inspect(span) {
  const found = tokenAt(span);
  if (!found) return;
  card.hide();
  document.querySelector(".tok.selected")?.classList.remove("selected");
  span.classList.add("selected");
  tab("token");
  if (!wide.matches) panel("side", true);
  inspector.show(found.token, found.ids, found.pick);
}

function point(span, delay) {
  const found = tokenAt(span);
  if (!found?.token.top.length) return;
  const { token, pick } = found;
  card.show(span, () => [alternatives(token, app.vocabulary, pick)], delay);
}

/** The K/V cache's meter stands at the top, or where there is little room among the settings. */
function placeMeter() {
  if (wide.matches) document.querySelector(".top .right").prepend($("cache"));
  else $("settings").append($("cache"));
}

function listen() {
  card = new Card($("card"));
  placeMeter();
  wide.addEventListener("change", placeMeter);
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("prompt").addEventListener("input", () => {
    button();
    grow();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || $("key-dialog").open) return;
    if (running) stop();
    else if (!card.element.hidden) card.hide();
    else { panel("tree", false); panel("side", false); }
  });
  $("new").addEventListener("click", () => {
    fail(null);
    trees[app.mode] = new Tree();
    keep();
    mode(app.mode);
    if (!wide.matches) panel("tree", false);
    $("prompt").focus();
  });
  $("copy").addEventListener("click", () => {
    const { chat, messages } = taken();
    copyBy($("copy"), markdownOf(messages, chat));
  });
  $("save-markdown").addEventListener("click", takeAsMarkdown);
  $("save-json").addEventListener("click", takeAsJson);
  for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", () => mode(radio.value));
  $("model-select").addEventListener("change", () => {
    location.search = `?model=${encodeURIComponent($("model-select").value)}`;
  });
  for (const text of [$("said"), $("compare")]) {
    roving(text);
    // Not pointerover: a text that grows below a pointer at rest is not pointed at.
    text.addEventListener("pointermove", ({ target, pointerType }) => {
      if (pointerType === "mouse" && target.classList.contains("tok")) point(target, 90);
    });
    text.addEventListener("pointerout", ({ pointerType }) => { if (pointerType === "mouse") card.hide(180); });
    text.addEventListener("focusin", ({ target }) => {
      if (!target.classList.contains("tok")) return;
      target.parentElement.querySelector(".tok[tabindex='0']")?.setAttribute("tabindex", -1); // one tab stop in each text
      target.tabIndex = 0;
      if (target.matches(":focus-visible")) point(target, 0);
    });
    text.addEventListener("focusout", () => card.hide(180));
    text.addEventListener("click", ({ target }) => { if (target.classList.contains("tok")) inspect(target); });
    text.addEventListener("keydown", (event) => {
      if (!event.target.classList.contains("tok") || (event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      inspect(event.target);
      $("token").querySelector(".alternatives button")?.focus();
    });
  }
  for (const scroller of [$("transcript"), $("compare")]) {
    scroller.addEventListener("scroll", () => card.hide(), { passive: true });
  }
  for (const name of ["tree", "side"]) {
    $(`show-${name}`).addEventListener("click", () => panel(name, !$(`${name}-panel`).classList.contains("open")));
  }
  $("close-side").addEventListener("click", () => panel("side", false));
  $("veil").addEventListener("click", () => { panel("tree", false); panel("side", false); });
  for (const name of ["token", "settings"]) $(`tab-${name}`).addEventListener("click", () => tab(name));
  $("side-panel").querySelector(".tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const name = $("token").hidden ? "token" : "settings";
    tab(name);
    $(`tab-${name}`).focus();
  });
  $("settings").addEventListener("change", () => document.body.classList.toggle("shaded", $("settings").shade.checked));
  $("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(dark ? "light" : "dark");
    localStorage.setItem("minillm.theme", dark ? "light" : "dark");
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && app.model) load(); });
}

start();
