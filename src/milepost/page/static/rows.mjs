// From the runs of a tree to rows: a path goes on along its row, and what branches off comes below.
// Knows nothing of pixels.

// Rows between paths that share nothing.
const GAP = 0.5;

// The fields of a run as the server sends it.
const [ID, PARENT, FIRST, PAGES, STRAYS, MARKS, NUM_MARKS, OTHERS] = [0, 1, 2, 3, 4, 5, 6, 7];

export function layOut(state) {
  const size = state.page_size;
  const bars = state.tree.runs.map((run) => bar(run, size));
  const roots = [];
  for (const one of bars) {
    if (one.parent === null) roots.push(one);
    else {
      one.above = bars[one.parent];
      one.above.below.push(one);
    }
  }
  place(state, bars, size);
  const shown = [];
  let row = addStarting(state, shown);
  for (const root of roots.reverse()) {
    if (root.marks.length || root.heads.length || root.others) row = addRoot(root, shown, row);
    for (const path of root.below.reverse()) row = addPaths(path, shown, row) + GAP;
  }
  const reach = (one) => Math.max(one.end, one.marks[0]?.position ?? 0, ...one.heads.map((head) => head.tokens));
  const end = shown.reduce((most, one) => Math.max(most, reach(one)), 0);
  return { bars: shown, byIndex: bars, rows: row, end };
}

function bar(run, size) {
  return {
    id: run[ID],
    parent: run[PARENT],
    start: run[FIRST] * size,
    end: (run[FIRST] + run[PAGES]) * size,
    pages: run[PAGES],
    strays: run[STRAYS],
    marks: run[MARKS].map(([position, kind, uses]) => ({ position, kind, uses })),
    numMarks: run[NUM_MARKS],
    others: run[OTHERS],
    above: null,
    below: [],
    heads: [],
    usedTo: 0,
    row: 0,
  };
}

// Put running requests where they stand; what is above them is in use.
function place(state, bars) {
  for (const [id, index, position, prompt, tokens] of state.running) {
    if (index === null) continue;
    const own = bars[index];
    own.heads.push({ id, position, prompt, tokens });
    own.usedTo = Math.max(own.usedTo, Math.min(own.end, position));
    for (let up = own.above; up && up.usedTo < up.end; up = up.above) up.usedTo = up.end;
  }
}

// Requests that have published nothing yet have a row each, at the top.
function addStarting(state, shown) {
  let row = 0;
  for (const [id, index, position, prompt, tokens] of state.running) {
    if (index !== null) continue;
    const own = bar([`starting ${id}`, null, 0, 0, 0, [], 0, null], 1);
    shown.push({ ...own, row, starting: true, heads: [{ id, position, prompt, tokens }] });
    row += 1;
  }
  return row;
}

// What is shorter than a page, and what is not listed, stands above a root's paths.
function addRoot(root, shown, row) {
  root.row = row;
  root.othersRow = row + (root.marks.length || root.heads.length ? 1 : 0);
  shown.push(root);
  return (root.others ? root.othersRow : row) + 1 + GAP;
}

// The oldest continuation stays on the row, the others follow below, each with its own.
function addPaths(path, shown, firstRow) {
  let row = firstRow;
  const todo = [{ one: path, goesOn: true }];
  while (todo.length) {
    const { one, goesOn, isOthers } = todo.pop();
    if (!goesOn) row += 1;
    if (isOthers) {
      one.othersRow = row;
      continue;
    }
    one.row = row;
    shown.push(one);
    if (one.others) todo.push({ one, goesOn: false, isOthers: true });
    const [first, ...rest] = one.below;
    // The newest is taken first, so the line of the fork ends at the second oldest.
    for (const next of rest) todo.push({ one: next, goesOn: false });
    if (first) todo.push({ one: first, goesOn: true });
  }
  return row + 1;
}
