const ROW = 44, MOST_ROWS = 24, FIRST = 6;
const turned = new Map(); // branches that were opened or closed by hand, and those whose colder ones were asked for
/* The prefix tree, left to right: a block is a run of tokens, as high as all that goes on from it; hot to cold. */
function showTree(place, scopes) {
  if (!scopes.length) return place.replaceChildren(el("div", { class: "dim" }, "nothing is cached"));
  const wide = place.clientWidth < 480 ? 150 : 190, hottest = Math.max(...scopes.map(each => each.heat), 1e-9);
  const top = { id: 0, children: scopes, branches: scopes.length };
  const open = new Set([0]), isOpen = node => turned.has(node.id) ? turned.get(node.id) : open.has(node.id);
  const shown = node => turned.get("all" + node.id) ? node.children : node.children.slice(0, FIRST);
  const waiting = [...shown(top)];
  for (let rows = waiting.length; waiting.length && rows < MOST_ROWS;) {
    waiting.sort((a, b) => b.heat - a.heat);
    const node = waiting.shift();
    if (!node.children.length) continue;
    open.add(node.id);
    rows += shown(node).length;
    waiting.push(...shown(node));
  }
  const blocks = [];
  let deepest = 0;
  function rest(node, row, depth) { // the branches that are not shown; some of them can be
    const count = node.branches - shown(node).length, some = shown(node).length < node.children.length;
    if (count <= 0) return row;
    blocks.push(el("button", { class: "branch rest", disabled: !some, onclick: () => { turned.set("all" + node.id, true); showTree(place, scopes); },
      style: { left: depth * wide + "px", top: row * ROW + "px", width: wide - 3 + "px", height: ROW - 3 + "px" } }, `+ ${num(count)} colder${some ? " ▾" : ""}`));
    deepest = Math.max(deepest, depth);
    return row + 1;
  }
  function below(node, row, depth) {
    for (const child of shown(node)) row = draw(child, row, depth);
    return rest(node, row, depth);
  }
  function draw(node, row, depth) {
    const opens = isOpen(node) && node.children.length > 0, end = opens ? below(node, row, depth + 1) : row + 1;
    const share = node.heat > 0 ? Math.max(0, 1 + Math.log2(node.heat / hottest) / 10) : 0;
    const closed = opens || !node.branches ? "" : ` ▸ ${num(node.branches)}`, running = node.running ? `, ${num(node.running)} running` : "";
    const lines = node.scope ? [scopeName(node.scope) + closed, `${num(node.uses)} requests${running}`]
      : [`tokens ${num(node.start)}–${num(node.end)}${closed}`, `found ${num(node.uses)} ×${running}`];
    blocks.push(el("button", { class: "branch", disabled: !node.children.length, "aria-expanded": String(opens), title: lines.join(", "),
      onclick: () => { turned.set(node.id, !opens); showTree(place, scopes); },
      style: { left: depth * wide + "px", top: row * ROW + "px", width: wide - 3 + "px", height: (end - row) * ROW - 3 + "px",
        background: `color-mix(in oklab, var(--hot) ${Math.round(72 * share)}%, var(--cold))` } }, ...lines.map(line => el("span", {}, line))));
    deepest = Math.max(deepest, depth);
    return end;
  }
  const rows = below(top, 0, 0);
  place.replaceChildren(el("div", { class: "small dim" }, "hot", el("span", { class: "scale" }), "cold. A block is a run of tokens that requests share; what goes on from it stands to its right. Open and close it by a click."),
    el("div", { class: "scroll" }, el("div", { class: "picture", style: { height: rows * ROW + "px", width: (deepest + 1) * wide + "px" } }, ...blocks)));
}
function scopeName({ tenant, lora, salt }) {
  return [tenant ?? "", lora == null ? "" : "adapter " + lora, salt == null ? "" : "salt " + salt].filter(each => each).join(", ") || "all requests";
}
