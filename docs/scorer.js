/* The order of a search's results: guides, then what lists runs and changes, then entries of the reference. */
var Scorer = {
  score: ([page, , , , score, , kind]) =>
    score - (kind === "object" || kind === "index" ? 1000 : /^(reference\/|benchmarks|changelog|sources|pairs|faults|matrix|torch-suite)/.test(page) ? 100 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
