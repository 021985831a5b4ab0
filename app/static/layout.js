// Where the nodes of a draft tree stand: columns by depth, leaves below each other, parents beside their likeliest child.

const CHAR = 7.3; // pixels of a letter at the size that style.css gives to tokens
const WIDE = /[\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60]|\p{Extended_Pictographic}/u;

export const ROW = 41;
export const BOX = 33;
const GAP = 42; // between columns, for the edges
const EDGE = 14; // around everything

/** Estimated width of a text in pixels. */
export function widthOf(text) {
  let width = 0;
  for (const letter of text) width += WIDE.test(letter) ? 2 * CHAR : CHAR;
  return width;
}

/**
 * Places for nodes `[{id, parent, depth, label, weight}]`, parents first; heavier siblings come first.
 * Returns `{places: Map id -> {x, y, width}, width, height}`; x is a box's left side, y its middle.
 */
export function layout(nodes) {
  const children = new Map(nodes.map((node) => [node.id, []]));
  for (const node of nodes) children.get(node.parent)?.push(node);
  for (const siblings of children.values()) siblings.sort((a, b) => b.weight - a.weight || a.id - b.id);

  const columns = [];
  for (const node of nodes) {
    columns[node.depth] = Math.max(columns[node.depth] ?? 0, Math.max(widthOf(node.label), 5 * CHAR) + 18);
  }
  const left = [EDGE];
  columns.forEach((width, depth) => (left[depth + 1] = left[depth] + width + GAP));

  const places = new Map();
  let row = 0;
  const put = (node) => {
    const below = children.get(node.id);
    let y = null;
    for (const child of below) {
      put(child);
      y ??= places.get(child.id).y; // beside the first one: the likeliest path is a straight line
    }
    y ??= EDGE + BOX / 2 + ROW * row++;
    places.set(node.id, { x: left[node.depth], y, width: columns[node.depth] });
  };
  nodes.filter((node) => !children.has(node.parent)).forEach(put);
  return { places, width: left[columns.length] - GAP + EDGE, height: 2 * EDGE + BOX + ROW * Math.max(row - 1, 0) };
}
