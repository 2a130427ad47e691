// A live page: asks its server for its newer version, and changes only what differs. Elements stay the same
// ones, so that focus, open tables, scroll positions and the selection stay where they are.
"use strict";
{
  const MIN_PAUSE_MS = 2000, RETRY_MS = 5000;
  // The reader's own state, which no update may touch.
  const isReaders = (node) => node.nodeType === 1 && node.matches(".cursor, output.readout, .updated");
  const isKept = (node, name) => name === "open" && node.nodeName === "DETAILS";

  const copyAttributes = (now, next) => {
    for (const { name } of [...now.attributes])
      if (!next.hasAttribute(name) && !isKept(now, name)) now.removeAttribute(name);
    for (const { name, value } of next.attributes)
      if (now.getAttribute(name) !== value && !isKept(now, name)) now.setAttribute(name, value);
  };
  const findNamed = (now, wanted) => {
    if (isReaders(wanted)) return [...now.children].find((each) => each.className === wanted.className);
    return wanted.id && [...now.children].find((each) => each.id === wanted.id);
  };
  const update = (now, next) => {
    if (isReaders(now) || now.isEqualNode(next)) return;
    if (now.nodeType !== 1) { now.data = next.data; return; }
    copyAttributes(now, next);
    let child = now.firstChild;
    for (const wanted of [...next.childNodes]) {
      const named = wanted.nodeType === 1 && findNamed(now, wanted);
      // Sections come and go: what has a name is found by it, the rest by its place.
      if (named && named !== child) now.insertBefore(named, child);
      const at = named || child;
      if (at && (named || (at.nodeName === wanted.nodeName && !at.id && !wanted.id))) {
        update(at, wanted);
        child = at.nextSibling;
      } else {
        now.insertBefore(document.importNode(wanted, true), child);
      }
    }
    while (child) { const gone = child; child = child.nextSibling; gone.remove(); }
  };

  let etag = "", since = "";
  const line = document.getElementById("live");
  const say = (text) => { line.querySelector(".updated").textContent = text; };
  const time = () => new Date().toTimeString().slice(0, 8);
  const charts = () => [...document.querySelectorAll("figure.chart")].filter((each) => each.querySelector("script.points"));
  const isSeen = new WeakSet(charts());

  const refresh = async () => {
    const answer = await fetch("", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(String(answer.status));
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      etag = answer.headers.get("ETag") || "";
      document.title = next.title;
      for (const place of [".page", "#live"])
        update(document.querySelector(place), next.querySelector(place));
      for (const figure of charts())
        if (!isSeen.has(figure)) { isSeen.add(figure); readOut(figure); }
    }
    line.classList.remove("lost");
    since = time();
    say("Up to date at " + since + ".");
  };
  const loop = async () => {
    const began = performance.now();
    let pause = RETRY_MS;
    // A hidden page asks for nothing; it is up to date soon after it is seen again.
    if (!document.hidden) {
      try {
        await refresh();
        pause = Math.max(MIN_PAUSE_MS, 5 * (performance.now() - began));
      } catch (error) {
        say("phalanx watch does not answer; this is the state of " + since + ".");
        line.classList.add("lost");
      }
    }
    timer = setTimeout(loop, pause);
  };
  let timer = setTimeout(loop, 0);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) { clearTimeout(timer); loop(); }
  });
}
