// The messages and the list of conversations in the browser: HTML from the server, patched in piece by piece.
//
// Everything goes through setHTML, which sanitizes. Of a message only the blocks that changed arrive, so that text can be
// selected and details stay open while more is written.

openk3.thread = (() => {
  const find = (selector) => document.querySelector(selector);
  const nodes = new Map();
  let editing = null;

  // One pass of the sanitizer for many pieces, each of them one element: a pass has a cost of its own.
  function fromHTML(pieces) {
    const holder = document.createElement("div");
    holder.setHTML(pieces.join(""));
    for (const button of holder.querySelectorAll(".code-copy")) {
      button.textContent = openk3.words.copy;
      button.setAttribute("aria-label", openk3.words.copy_code);
    }
    const elements = [...holder.children];
    return elements.length === pieces.length || pieces.length === 1 ? elements : pieces.flatMap((html) => fromHTML([html]));
  }

  // A details element stays, so that it stays open or closed as the reader left it: only what is in it is exchanged.
  function replace(old, fresh) {
    if (old.tagName !== "DETAILS" || fresh.tagName !== "DETAILS") return old.replaceWith(fresh);
    for (const name of ["data-status", "data-live"])
      if (fresh.hasAttribute(name)) old.setAttribute(name, fresh.getAttribute(name));
      else old.removeAttribute(name);
    if (fresh.open) old.open = true;
    const parts = [...fresh.children];
    [...old.children].forEach((part, i) => {
      if (parts[i] && part.innerHTML !== parts[i].innerHTML) {
        if (part.tagName === "SUMMARY") part.innerHTML = parts[i].innerHTML; // it has been sanitized, and keeps the focus
        else part.replaceWith(parts[i]);
      }
    });
  }

  function build(patch) {
    const article = document.createElement("article");
    article.className = `message ${patch.kind}`;
    article.dataset.message = patch.id;
    article.tabIndex = -1;
    article.setAttribute("aria-label", patch.label);
    const body = article.appendChild(document.createElement("div"));
    body.className = patch.kind === "message-user" ? "said" : "prose";
    body.dir = "auto";
    article.appendChild(document.createElement("div")).className = "foot";
    return article;
  }

  const FOOT = "foot";

  function apply(patches) {
    const pieces = patches.flatMap((patch) => {
      const blocks = Object.entries(patch.blocks);
      return (patch.foot === undefined ? blocks : [...blocks, [FOOT, `<div class="foot">${patch.foot}</div>`]]).map((piece) => [patch, ...piece]);
    });
    const fresh = fromHTML(pieces.map(([, , html]) => html));
    for (const patch of patches) {
      const article = nodes.get(patch.id), body = article.firstElementChild;
      while (body.children.length > patch.count) body.lastElementChild.remove();
      if (patch.busy) article.setAttribute("aria-busy", "true");
      else article.removeAttribute("aria-busy");
    }
    pieces.forEach(([patch, place], i) => {
      const article = nodes.get(patch.id), body = article.firstElementChild;
      if (place === FOOT) article.querySelector(":scope > .foot").replaceWith(fresh[i]);
      else if (body.children[place]) replace(body.children[place], fresh[i]);
      else body.append(fresh[i]);
    });
  }

  function clear() {
    nodes.clear();
    editing = null;
    find(".thread").replaceChildren();
  }

  function show(order, patches) {
    const column = find(".thread"), scroller = find(".scroller");
    const first = column.firstElementChild, top = first?.getBoundingClientRect().top;
    for (const patch of patches) if (!nodes.has(patch.id)) nodes.set(patch.id, build(patch));
    apply(patches);
    const wanted = new Set(order);
    for (const [id, node] of nodes)
      if (!wanted.has(id)) { node.remove(); nodes.delete(id); }
    let next = column.firstElementChild;
    for (const id of order) {
      const node = nodes.get(id);
      if (node === next) next = next.nextElementSibling;
      else column.insertBefore(node, next);
    }
    // What the reader looks at stays where it is when earlier messages come in above it.
    if (first?.isConnected && first !== column.firstElementChild) scroller.scrollTop += first.getBoundingClientRect().top - top;
  }

  function grow(patch) {
    if (nodes.has(patch.id)) apply([patch]);
  }

  function reveal(id) {
    const node = nodes.get(id);
    if (!node) return;
    node.scrollIntoView({ block: "center" });
    node.classList.add("found");
    setTimeout(() => node.classList.remove("found"), 2000);
  }

  // editing a message in its place

  function edit(article) {
    if (editing) close();
    const words = openk3.words;
    const editor = document.createElement("div");
    editor.className = "editor";
    const area = editor.appendChild(document.createElement("textarea"));
    area.className = "editor-text";
    area.value = article.querySelector(".plain").textContent;
    area.rows = 3;
    area.setAttribute("aria-label", words.edit_label);
    const help = editor.appendChild(document.createElement("p"));
    help.className = "help";
    help.textContent = words.edit_help;
    const buttons = editor.appendChild(document.createElement("div"));
    buttons.className = "editor-buttons";
    for (const [label, kind, act] of [
      [words.cancel, "quiet editor-cancel", close],
      [words.save_and_ask, "primary", () => emitEvent("chat_message", { do: "edited", id: Number(article.dataset.message), text: openk3.wellFormed(area.value) })],
    ]) {
      const button = buttons.appendChild(document.createElement("button"));
      button.type = "button";
      button.className = `button ${kind}`;
      button.textContent = label;
      button.addEventListener("click", act);
    }
    article.classList.add("edited");
    article.append(editor);
    editing = article;
    area.style.height = `${area.scrollHeight + 2}px`;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  function close() {
    editing?.querySelector(".editor")?.remove();
    editing?.classList.remove("edited");
    const button = editing?.querySelector('[data-do="edit"]');
    editing = null;
    button?.focus();
  }

  document.addEventListener("click", (event) => {
    const control = event.target.closest?.(".message [data-do]");
    if (!control) return;
    const article = control.closest(".message");
    if (control.dataset.do === "edit") edit(article);
    else emitEvent("chat_message", { do: control.dataset.do, id: Number(article.dataset.message), to: control.dataset.to ?? "" });
  });

  // earlier messages come by themselves when the reader gets near them

  function watch() {
    const button = find(".earlier");
    new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting) && nodes.size) button.click();
    }, { root: find(".scroller"), rootMargin: "900px 0px 0px 0px" }).observe(button);
  }

  // the list of conversations

  function list(html) {
    const nav = find(".conversations");
    const focused = nav.contains(document.activeElement) ? document.activeElement : null;
    const key = focused?.closest("[data-row]")?.dataset.row, kind = focused?.className;
    const top = nav.scrollTop;
    nav.setHTML(html);
    nav.scrollTop = top;
    if (key) [...nav.querySelectorAll(`[data-row="${CSS.escape(key)}"] *`)].find((node) => node.className === kind)?.focus();
  }

  return { clear, show, grow, reveal, edit, close, watch, list, editing: () => editing };
})();
