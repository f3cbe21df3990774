"""The completion server's web page: a box to type in, settings, and the text as it comes. One file, nothing is loaded from elsewhere."""

from __future__ import annotations

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>megalite</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem; }
  textarea { width: 100%; box-sizing: border-box; font: inherit; padding: .5rem; }
  form div { display: flex; flex-wrap: wrap; gap: 1rem; margin: .5rem 0; align-items: end; }
  label { font-size: .85rem; }
  input { display: block; width: 6rem; font: inherit; }
  button { font: inherit; padding: .2rem 1rem; }
  #text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; padding: .75rem; min-height: 8rem; }
  #text b { font-weight: 400; opacity: .6; }
  #state { font-size: .85rem; opacity: .8; min-height: 1.5em; }
</style>
<h1>megalite</h1>
<form id="form">
  <textarea id="prompt" rows="4" placeholder="A text to continue; empty: a new document" autofocus></textarea>
  <div>
    <label>new tokens <input id="max_tokens" type="number" min="1" value="200"></label>
    <label>temperature <input id="temperature" type="number" min="0" step="0.05" value="0.8"></label>
    <label>top k <input id="top_k" type="number" min="0" value="40"></label>
    <label>top p <input id="top_p" type="number" min="0" max="1" step="0.01" value="1"></label>
    <label>seed <input id="seed" type="number" min="0" placeholder="any"></label>
    <button id="go">Continue</button> <button id="stop" type="button" disabled>Stop</button>
  </div>
</form>
<p id="state" role="status"></p>
<div id="text" aria-live="off"></div>
<script>
const at = id => document.getElementById(id);
let running = null;
at("stop").onclick = () => running && running.abort();
at("prompt").onkeydown = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit(); };
at("form").onsubmit = async event => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  at("go").disabled = true; at("stop").disabled = false; at("state").textContent = "waiting";
  const prompt = at("prompt").value, body = { prompt, stream: true };
  for (const name of ["max_tokens", "temperature", "top_k", "top_p", "seed"])
    if (at(name).value !== "") body[name] = Number(at(name).value);
  const given = document.createElement("b");
  given.textContent = prompt;
  at("text").replaceChildren(given);
  const begin = performance.now();
  let pieces = 0, reason = "";
  try {
    const answer = await fetch("v1/completions", { method: "POST", signal: running.signal,
      headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split("\\n\\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.slice(6);
        if (data === "[DONE]") continue;
        const message = JSON.parse(data);
        if (message.error) throw new Error(message.error.message);
        at("text").append(message.choices[0].text);
        reason = message.choices[0].finish_reason || reason;
        const seconds = (performance.now() - begin) / 1000;
        at("state").textContent = `${++pieces} pieces in ${seconds.toFixed(1)} s`;
      }
    }
    if (reason) at("state").textContent += `, ended by ${reason}`;
  } catch (error) {
    at("state").textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  running = null; at("go").disabled = false; at("stop").disabled = true;
};
</script>
</html>
"""
