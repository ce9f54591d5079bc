// The chat page: streams /v1/chat/completions, shows every token with its log-probability, and the server's load.
"use strict";

const byId = (id) => document.getElementById(id);
const conversation = [];
let running = null;

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function addMessage(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  byId("conversation").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

function shownToken(text, record) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  if (record) {
    const share = Math.exp(record.logprob);
    const others = (record.top_logprobs || []).map((one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`);
    span.style.setProperty("--doubt", (1 - share).toFixed(3));
    span.title = `log-probability ${record.logprob.toFixed(3)} (${(100 * share).toFixed(1)} %)\n${others.join("\n")}`;
  }
  return span;
}

// The text of a chunk cut where its tokens end; what tokens do not account for (a held-back tail) stays one piece.
function pieces(text, records) {
  const cut = [];
  let rest = text;
  for (const record of records) {
    if (!rest) break;
    const size = rest.startsWith(record.token) ? record.token.length : rest.length;
    cut.push([rest.slice(0, size), record]);
    rest = rest.slice(size);
  }
  if (rest) cut.push([rest, null]);
  return cut;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const frames = buffer.split("\n\n");
    buffer = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

class Answer {
  constructor() {
    this.box = addMessage("assistant", "");
    this.text = "";
    this.tokens = 0;
    this.began = performance.now();
    this.first = null;
  }

  part(name, text) {
    let last = this.box.lastElementChild;
    if (!last || last.className !== name) {
      last = document.createElement("div");
      last.className = name;
      this.box.append(last);
    }
    last.append(text);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    for (const choice of chunk.choices) {
      const delta = choice.delta;
      this.first ??= performance.now();
      if (delta.reasoning_content) this.part("reasoning", delta.reasoning_content);
      for (const call of delta.tool_calls || []) this.part("call", `${call.function.name || ""}${call.function.arguments || ""}`);
      if (delta.content) {
        this.text += delta.content;
        for (const [text, record] of pieces(delta.content, choice.logprobs ? choice.logprobs.content : [])) this.box.append(shownToken(text, record));
      }
    }
    const pane = byId("conversation");
    if (pane.scrollHeight - pane.scrollTop - pane.clientHeight < 120) this.box.scrollIntoView({ block: "end" });
  }

  end(note) {
    const seconds = (performance.now() - this.began) / 1000;
    const wait = this.first === null ? "" : `, first after ${((this.first - this.began) / 1000).toFixed(2)} s`;
    const facts = document.createElement("span");
    facts.className = "facts";
    facts.textContent = note || `${this.tokens} tokens in ${seconds.toFixed(2)} s${wait}, ${(this.tokens / seconds).toFixed(1)} tokens/s`;
    this.box.append(facts);
  }
}

function busy(is) {
  byId("send").disabled = is;
  byId("stop").disabled = !is;
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const answer = new Answer();
  running = new AbortController();
  busy(true);
  const temperature = byId("temperature").value;
  const body = {
    messages: conversation, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 3,
    max_tokens: Number(byId("max-tokens").value) || 256, ...(temperature === "" ? {} : { temperature: Number(temperature) }),
  };
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) answer.take(chunk);
    answer.end();
  } catch (error) {
    if (error.name !== "AbortError") answer.box.classList.add("failed");
    answer.end(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    conversation.push({ role: "assistant", content: answer.text });
    running = null;
    busy(false);
  }
}

async function showLoad() {
  try {
    const now = await (await fetch("/load", { headers: headers() })).json();
    if (now.error) throw new Error(now.error.message);
    byId("load-text").textContent = `${now.running} running, ${now.waiting} waiting, KV ${(100 * now.kv_utilization).toFixed(1)} %`;
    byId("kv").value = now.kv_utilization;
  } catch (error) {
    byId("load-text").textContent = "no answer";
  }
}

async function showModel() {
  try {
    const found = await (await fetch("/v1/models", { headers: headers() })).json();
    byId("model").textContent = found.data.map((one) => one.id).join(", ");
  } catch (error) {
    byId("model").textContent = "no model";
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  ask(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation.length = 0;
  byId("conversation").replaceChildren();
});
byId("shade").addEventListener("change", () => byId("conversation").classList.toggle("shaded", byId("shade").checked));
byId("conversation").classList.add("shaded");
showModel();
showLoad();
setInterval(showLoad, 2000);
