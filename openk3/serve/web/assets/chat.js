// What the chat does in the browser itself: theme, keyboard, the text being written, scrolling, panels, copying, dropped files.
//
// The server draws the page and owns the conversations; this file keeps what must not wait for it. Everything is delegated
// from the document, because elements come and go as the server redraws. Events to the server go through NiceGUI's emitEvent.

window.openk3 = (() => {
  const root = document.documentElement;
  const find = (selector) => document.querySelector(selector);
  const composer = () => find("#composer-text");

  // theme: the system's, unless the reader chose the other one

  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("openk3-theme"); } catch { return null; } };
  const wanted = () => chosen() ?? (system.matches ? "dark" : "light");

  function applyTheme() {
    root.dataset.theme = wanted();
    if (typeof setDark === "function") setDark(wanted() === "dark");
  }

  function toggleTheme() {
    const next = wanted() === "dark" ? "light" : "dark";
    const isSystem = next === (system.matches ? "dark" : "light");
    try {
      if (isSystem) localStorage.removeItem("openk3-theme");
      else localStorage.setItem("openk3-theme", next);
    } catch { /* storage may be forbidden; the choice then lasts until the page is left */ }
    applyTheme();
  }

  applyTheme();
  system.addEventListener("change", applyTheme);
  addEventListener("storage", applyTheme);

  // panels: the list (an overlay on narrow screens only) and the settings

  const narrow = matchMedia("(max-width: 860px)");

  function panel(name, open) {
    const isOpen = open ?? root.dataset[name] !== "open";
    const before = document.activeElement;
    if (isOpen && narrow.matches) closePanels();
    root.dataset[name] = isOpen ? "open" : "closed";
    settlePanels();
    if (isOpen) find(`#${name} .icon-button, #${name} button`)?.focus();
    else if (find(`#${name}`)?.contains(before)) find(`[aria-controls="${name}"]`)?.focus();
  }

  function closePanels() {
    root.dataset.sidebar = root.dataset.settings = "closed";
    settlePanels();
  }

  function settlePanels() {
    const sidebar = find("#sidebar"), settings = find("#settings");
    if (sidebar) sidebar.inert = narrow.matches && root.dataset.sidebar !== "open";
    if (settings) settings.inert = root.dataset.settings !== "open";
    for (const name of ["sidebar", "settings"])
      find(`[aria-controls="${name}"]`)?.setAttribute("aria-expanded", String(root.dataset[name] === "open"));
  }

  narrow.addEventListener("change", settlePanels);

  // the text being written survives a reload

  const DRAFT = "openk3-draft";

  function grow(area) {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`;
  }

  function keepDraft() {
    try { sessionStorage.setItem(DRAFT, composer()?.value ?? ""); } catch { /* storage may be forbidden */ }
  }

  function setDraft(text) {
    const area = composer();
    if (!area) return;
    area.value = text;
    grow(area);
    keepDraft();
    focus();
  }

  function focus() {
    composer()?.focus();
  }

  // The server cannot read halves of surrogate pairs.
  const wellFormed = (text) => text.toWellFormed?.() ?? text;
  let sentAt = -1000;

  function send() {
    const area = composer();
    if (!area || find(".composer").dataset.busy || performance.now() - sentAt < 400) return;
    sentAt = performance.now(); // a double press is one message
    emitEvent("chat_send", wellFormed(area.value));
  }

  function stop() {
    emitEvent("chat_stop");
  }

  // scrolling: follow the answer as long as the reader is at the end

  let pinned = true;

  function atEnd() {
    const box = find(".scroller");
    return !box || box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  }

  function showAway() {
    root.toggleAttribute("data-away", !pinned && !atEnd());
  }

  function follow() {
    const box = find(".scroller");
    if (box && pinned) box.scrollTop = box.scrollHeight;
    showAway();
  }

  function pin() {
    pinned = true;
    follow();
  }

  // address, clipboard, links

  function location_(path, title, push) {
    document.title = path === "/" ? "OpenK3" : `${title} · OpenK3`;
    const url = (window.path_prefix ?? "") + path;
    if (location.pathname !== url) history[push ? "pushState" : "replaceState"](null, "", url);
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { // without https the clipboard API is missing
      const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }

  document.addEventListener("click", async (event) => {
    const code = event.target.closest?.(".code-copy");
    if (code) {
      const words = window.openk3.words;
      const done = await copy(code.closest(".code").querySelector("pre code").textContent);
      code.textContent = done ? words.copied : words.press_copy;
      setTimeout(() => { code.textContent = words.copy; }, 1500);
    }
    const link = event.target.closest?.("a.external");
    if (link) {
      event.preventDefault();
      open(link.href, "_blank", "noopener,noreferrer");
    }
    const row = event.target.closest?.("a[data-conversation]");
    if (row && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
      event.preventDefault();
      // At once, so that the next key goes on from here.
      for (const link of document.querySelectorAll("a[data-conversation]")) link.removeAttribute("aria-current");
      row.setAttribute("aria-current", "page");
      emitEvent("chat_open", { id: row.dataset.conversation, message: row.dataset.message ? Number(row.dataset.message) : null });
      if (narrow.matches) closePanels();
    }
    const more = event.target.closest?.('[data-do="menu"]');
    if (more) openMenu(more);
    const item = event.target.closest?.("[data-menu]");
    if (item) {
      const menu = find("#conversation-menu");
      menu.hidePopover();
      emitEvent("chat_conversation", { do: item.dataset.menu, id: menu.dataset.conversation });
    }
    if (event.target.closest?.('[data-do="show_all"]')) emitEvent("chat_show_all");
    if (event.target.closest?.(".new-chat") && narrow.matches) closePanels();
    if (event.target.closest?.("#language")) switchLanguage();
    const skip = event.target.closest?.(".skip-link");
    if (skip) { event.preventDefault(); focus(); }
  });

  // the menu of a conversation, beside the button that was pressed

  function openMenu(button) {
    const menu = find("#conversation-menu"), place = button.getBoundingClientRect();
    menu.dataset.conversation = button.closest("[data-row]").dataset.row;
    menu.querySelector('[data-menu="pin"]').textContent = window.openk3.words[button.dataset.pinned ? "unpin" : "pin"];
    menu.showPopover();
    menu.style.left = `${Math.min(place.left, innerWidth - menu.offsetWidth - 8)}px`;
    menu.style.top = `${Math.min(place.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    menu.querySelector("button").focus();
  }

  // a popover opens beside the button it belongs to, above or below it, where there is room

  document.addEventListener("toggle", (event) => {
    const menu = event.target, button = menu.id && find(`[popovertarget="${menu.id}"]`);
    if (event.newState !== "open" || !button) return;
    const place = button.getBoundingClientRect(), height = menu.offsetHeight;
    const left = Math.min(place.left, innerWidth - menu.offsetWidth - 8);
    menu.style.left = `${Math.max(8, left)}px`;
    const below = place.bottom + 6 + height < innerHeight;
    menu.style.top = below ? `${place.bottom + 6}px` : "auto";
    menu.style.bottom = below ? "auto" : `${innerHeight - place.top + 6}px`;
  }, true);

  document.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const menu = step && event.target.closest?.('[role="menu"]');
    if (!menu) return;
    event.preventDefault();
    const items = [...menu.querySelectorAll("button")];
    items[(items.indexOf(event.target) + step + items.length) % items.length].focus();
  });

  function switchLanguage() {
    const next = root.lang.startsWith("zh") ? "en" : "zh";
    document.cookie = `openk3-language=${next}; path=/; max-age=31536000; samesite=lax`;
    location.reload();
  }

  addEventListener("popstate", () => {
    const match = location.pathname.match(/\/c\/([^/]+)$/);
    emitEvent("chat_navigate", match ? match[1] : "");
  });

  // keyboard

  function search() {
    if (narrow.matches) panel("sidebar", true);
    find("#search")?.focus();
    find("#search")?.select();
  }

  function help() {
    const dialog = find("#help");
    if (dialog.open) dialog.close();
    else dialog.showModal();
  }

  function neighbour(step) {
    const links = [...document.querySelectorAll("a[data-conversation]")];
    const here = links.findIndex((link) => link.hasAttribute("aria-current"));
    links[here < 0 ? (step > 0 ? 0 : links.length - 1) : here + step]?.click();
  }

  function escape(area) {
    if (area?.classList.contains("editor-text")) window.openk3.thread.close();
    else if (document.activeElement?.id === "search" && find("#search").value) clearSearch();
    else if (narrow.matches && [root.dataset.sidebar, root.dataset.settings].includes("open")) closePanels();
    else if (find(".composer")?.dataset.busy) stop();
    else if (root.dataset.settings === "open") panel("settings", false);
    else if (document.activeElement?.id === "search") focus();
  }

  document.addEventListener("keydown", (event) => {
    const target = event.target, area = target.closest?.("textarea");
    const composing = event.isComposing || event.keyCode === 229; // an input method is choosing characters
    const writing = target.closest?.("textarea, input:not([type=checkbox]):not([type=radio]):not([type=range]), select");
    const control = (event.ctrlKey || event.metaKey) && !event.altKey, key = event.key.toLowerCase();
    const act = (action) => { event.preventDefault(); action(); };
    if (composing || !composer()) return; // other pages have no chat to act on
    if (event.key === "Enter" && area?.id === "composer-text" && !event.shiftKey) act(send);
    else if (event.key === "Enter" && area?.classList.contains("editor-text") && control) act(() => area.closest(".editor").querySelector(".primary").click());
    else if (control && event.shiftKey && key === "o") act(() => { emitEvent("chat_new"); if (narrow.matches) closePanels(); });
    else if (control && !event.shiftKey && key === "k") act(search);
    else if (control && !event.shiftKey && event.key === ",") act(() => panel("settings"));
    else if (event.altKey && !control && event.key === "ArrowUp") act(() => neighbour(-1));
    else if (event.altKey && !control && event.key === "ArrowDown") act(() => neighbour(1));
    else if (event.key === "?" && !writing) act(help);
    else if (event.key === "Escape" && !find(".q-dialog, dialog[open], :popover-open")) escape(area);
  });

  let searchTimer;
  function searchChanged(text) {
    clearTimeout(searchTimer);
    searchTimer = setTimeout(() => emitEvent("chat_search", wellFormed(text)), 150);
  }

  function clearSearch() {
    find("#search").value = "";
    searchChanged("");
  }

  document.addEventListener("input", (event) => {
    const target = event.target;
    if (target.id === "composer-text") { grow(target); keepDraft(); }
    else if (target.id === "search") searchChanged(target.value);
    else if (target.classList.contains("editor-text")) grow(target);
    else if (target.dataset.twin) document.getElementById(target.dataset.twin).value = target.value;
    else if (target.type === "number") {
      const slider = find(`[data-twin="${CSS.escape(target.id)}"]`);
      if (slider) slider.value = target.value;
    }
  });

  // files: dropped, pasted or picked, all go through NiceGUI's uploader

  function addFiles(files) {
    const box = find(".composer");
    const fitting = [];
    for (const file of files) {
      if (file.size > Number(box.dataset.limit)) emitEvent("chat_file_too_large", { name: file.name, size: file.size });
      else fitting.push(file);
    }
    if (fitting.length) getElement(Number(box.dataset.upload)).$refs.qRef.addFiles(fitting);
  }

  const pickFiles = () => find("#composer-file").click();
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  let depth = 0;
  addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth++; root.toggleAttribute("data-drop", true); } });
  addEventListener("dragleave", (event) => { if (hasFiles(event) && --depth <= 0) root.removeAttribute("data-drop"); });
  addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    root.removeAttribute("data-drop");
    addFiles([...event.dataTransfer.files]);
    focus();
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length && event.target.id === "composer-text") { event.preventDefault(); addFiles(files); }
  });
  document.addEventListener("change", (event) => {
    if (event.target.id !== "composer-file") return;
    addFiles([...event.target.files]);
    event.target.value = "";
    focus();
  });

  // once the page is drawn

  function begin() {
    const scroller = find(".scroller");
    scroller.addEventListener("scroll", () => { pinned = atEnd(); showAway(); }, { passive: true });
    new MutationObserver(follow).observe(scroller, { subtree: true, childList: true, characterData: true });
    new ResizeObserver(follow).observe(scroller);
    new ResizeObserver(follow).observe(find(".thread"));
    applyTheme();
    settlePanels();
    if (/^(Mac|iP)/.test(navigator.platform)) {
      find(".shortcut").textContent = "⌘ K";
      for (const key of document.querySelectorAll(".key")) if (key.textContent === "Ctrl") key.textContent = "⌘";
    }
    window.openk3.thread.watch();
    window.openk3.start?.();
    let draft = "";
    try { draft = sessionStorage.getItem(DRAFT) ?? ""; } catch { /* storage may be forbidden */ }
    const area = composer();
    if (draft && !area.value) area.value = draft;
    grow(area);
    if (!matchMedia("(hover: none)").matches) focus();
  }

  new MutationObserver((_, observer) => {
    if (find(".scroller") && composer()) { observer.disconnect(); begin(); }
  }).observe(root, { subtree: true, childList: true });

  return { toggleTheme, panel, closePanels, setDraft, clearDraft: () => setDraft(""), focus, send, stop, pin, copy, help, pickFiles, wellFormed, location: location_ };
})();
