// The pages "Try it": what `clcomm tune --from FILE` predicts, by the same formulas (clcomm/insight/measure/what_if.py and what
// that imports); a test compares the numbers. Nothing is loaded: the file that comes with a page is in it.
"use strict";

// --- numbers as Python prints them ---

function fixed(value, places) {
  const text = value.toFixed(places), exact = value.toFixed(100);
  const behind = exact.slice(exact.indexOf(".") + 1 + places);
  if (!/^50*$/.test(behind)) return text;  // else halfway between two: Python takes the even one, toFixed the larger
  const kept = exact.slice(0, exact.length - behind.length).replace(/\.$/, "");
  return Number(kept.at(-1)) % 2 ? text : kept;
}
const milliseconds = (seconds) => fixed(seconds * 1e3, 3);
const percent = (share) => `${fixed(share * 100, 1)}%`;
function formatSize(nbytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (nbytes < 1024) return `${fixed(nbytes, unit === "B" || Number.isInteger(nbytes) ? 0 : 1)} ${unit}`;
    nbytes /= 1024;
  }
  return `${fixed(nbytes, 1)} GiB`;
}

// --- the cost of an all-reduce (clcomm/comm/costs/model.py) ---

function read(text) {
  const file = JSON.parse(text), fits = file.fits ?? [];
  const found = ["all_reduce_init", "all_reduce"].flatMap((name) => fits.filter((fit) => fit.operation === name));
  const numbers = [file.world_size, file.ranks_per_host, found[0]?.alpha_s, found[0]?.beta_s_per_byte];
  if (!numbers.every((each) => Number.isFinite(each) && each >= 0) || file.world_size < 2)
    throw new Error("This is no file of clcomm bench --json with an all_reduce of two sizes or more.");
  return { alpha: numbers[2], beta: numbers[3], ranks: numbers[0], transport: found[0].transport,
           hosts: Math.ceil(numbers[0] / numbers[1]) };
}
function costOf(measured, ranks) {
  const { alpha, beta, ranks: known } = measured;
  if (ranks === known) return (nbytes) => alpha + beta * nbytes;
  if (measured.hosts > 1) throw new Error(`The file is of ${measured.hosts} hosts: only its ${known} ranks are known.`);
  if (ranks === 1) return () => 0;
  const [a, b] = [alpha * (ranks - 1) / (known - 1), beta * (ranks + 1) / (known + 1)];
  return (nbytes) => a + b * nbytes;
}

// --- buckets and overlap (clcomm/comm/costs/forecast.py, clcomm/base/flat_space/buckets.py) ---

function equalTensors(nbytes, count) {
  return Array.from({ length: count }, (_, at) => Math.floor(nbytes * (at + 1) / count) - Math.floor(nbytes * at / count));
}
/** Groups of positions in the order in which backward completes them, the last tensor first. */
function bucketGroups(tensors, size) {
  const groups = [];
  let filled = 0;
  for (const nbytes of tensors.toReversed()) {
    if (groups.length && size !== null && filled + nbytes <= size) groups.at(-1).push(nbytes);
    else { groups.push([nbytes]); filled = 0; }
    filled += nbytes;
  }
  return groups;
}
const sum = (values) => values.reduce((total, value) => total + value, 0);
/** The times at which buckets begin and end, and a step's length. */
function stepOf(buckets, cost, forward, backward, overlap) {
  if (!overlap) {
    let end = forward + backward;
    const turns = buckets.map((nbytes) => ({ begin: end, end: (end += cost(nbytes)) }));
    return { turns, seconds: forward + backward + sum(buckets.map(cost)) };
  }
  const total = sum(buckets), turns = [];
  let complete = 0, done = 0;
  for (const nbytes of buckets) {
    complete += nbytes;
    const begin = Math.max(done, total ? backward * complete / total : backward);
    done = begin + cost(nbytes);
    turns.push({ begin: forward + begin, end: forward + done });
  }
  return { turns, seconds: forward + Math.max(backward, done) };
}
function recommend(tensors, cost, forward, backward, overlap) {
  const sizes = [null, 1024], found = new Map();
  while (sizes.at(-1) < sum(tensors)) sizes.push(2 * sizes.at(-1));
  for (const size of sizes) {
    const buckets = bucketGroups(tensors, size).map(sum), key = buckets.join();
    const known = found.get(key);
    if (!known) found.set(key, { size, buckets, ...stepOf(buckets, cost, forward, backward, overlap) });
    else if (known.size === null) known.size = size;
  }
  const candidates = [...found.values()], fastest = Math.min(...candidates.map((each) => each.seconds));
  const alike = candidates.filter((each) => each.seconds <= fastest * (1 + 1e-9));
  const best = alike.reduce((one, other) => other.buckets.length < one.buckets.length ? other : one);
  return { best, candidates };
}

// --- ZeRO (clcomm/base/flat_space/memory.py, shards.py) ---

const ALIGNMENT = 512, ADAM = 2;
const aligned = (nbytes) => Math.ceil(nbytes / ALIGNMENT) * ALIGNMENT;
function memoryOf(tensors, ranks, size) {
  const groups = bucketGroups(tensors.map((nbytes) => 4 * Math.ceil(nbytes / 4)), size);
  const units = groups.map((group) => sum(group.map(aligned)));
  const parts = units.map((nbytes) => Math.ceil(nbytes / (ranks * ALIGNMENT)) * ALIGNMENT);
  const whole = sum(units), part = sum(parts), largestPart = Math.max(...parts), several = ranks > 1;
  const means = several ? Math.floor(whole / ranks) : 0, row = ranks * largestPart;
  const inFlight = Math.min(2, units.length) * Math.max(...units) + (several ? 2 : 1) * row + largestPart;
  return [0, 1, 2, 3].map((stage) => [
    stage ? part : whole,
    stage > 1 ? part : whole + means, ADAM * (stage ? part : whole), stage > 1 ? inFlight : 0,
  ]);
}

// --- pipelines (clcomm/base/schedules/pipeline.py) ---

function actionsOf(name, rank, ranks, micro, chunks) {
  const forwards = [], backwards = [];
  for (let number = 0; number < chunks * micro; number++) {
    const place = number % (ranks * chunks), chunk = name === "interleaved" ? Math.floor(place / ranks) : 0;
    const m = name === "interleaved" ? Math.floor(number / (ranks * chunks)) * ranks + place % ranks : number;
    forwards.push({ stage: chunk * ranks + rank, m, forward: true });
    backwards.push({ stage: (chunks - 1 - chunk) * ranks + rank, m, forward: false });
  }
  let warmUp = name === "interleaved" ? 2 * (ranks - rank - 1) + (chunks - 1) * ranks : ranks - rank - 1;
  if (name === "gpipe") warmUp = forwards.length;
  warmUp = Math.min(warmUp, forwards.length);
  const order = forwards.slice(0, warmUp);
  forwards.slice(warmUp).forEach((forward, at) => order.push(forward, backwards[at]));
  return order.concat(backwards.slice(forwards.length - warmUp));
}
function pipelineOf(name, ranks, micro, chunks, forward, backward) {
  const stages = ranks * chunks, free = Array(ranks).fill(0), done = new Map();
  const orders = free.map((_, rank) => actionsOf(name, rank, ranks, micro, chunks)), left = orders.map((each) => [...each]);
  const end = (stage, m, isForward) => done.get(`${stage} ${m} ${isForward}`)?.end;
  function earliest({ stage, m, forward: isForward }) {
    if (isForward) return stage ? end(stage - 1, m, true) : 0;
    const own = end(stage, m, true), behind = stage === stages - 1 ? 0 : end(stage + 1, m, false);
    return own === undefined || behind === undefined ? undefined : Math.max(own, behind);
  }
  while (left.some((each) => each.length)) left.forEach((waiting, rank) => {
    for (let begin; waiting.length && (begin = earliest(waiting[0])) !== undefined;) {
      const action = waiting.shift();
      begin = Math.max(begin, free[rank]);
      free[rank] = begin + (action.forward ? forward : backward) / (chunks * micro);
      done.set(`${action.stage} ${action.m} ${action.forward}`, { rank, begin, end: free[rank], ...action });
    }
  });
  const turns = [...done.values()], seconds = Math.max(...turns.map((turn) => turn.end));
  let alive = 0, kept = 0;
  for (const action of orders[0]) kept = Math.max(kept, alive += action.forward ? 1 : -1);
  const idle = 1 - sum(turns.map((turn) => turn.end - turn.begin)) / (ranks * seconds);
  return { name, stages, turns, seconds, idle, kept };
}

// --- drawings ---

const BLUE = "#0072b2", GREEN = "#009e73", ORANGE = "#d55e00", GREY = "#7f868d", SKY = "#56b4e9";
const key = (entries) => entries.map(([colour, text]) => `<span><i style="background:${colour}"></i> ${text}</span>`).join(" ");
/** Rows of [name, [[begin, end, colour, title], ...]] over one axis from 0 to the largest end. */
function drawing(rows, description, entries) {
  const most = Math.max(...rows.flatMap(([, parts]) => parts.map(([, end]) => end))) || 1;
  const x = (value) => 1000 * value / most;
  const bars = rows.map(([name, parts]) => `<span>${name}</span><svg viewBox="0 0 1000 1" preserveAspectRatio="none">` +
    parts.map(([begin, end, colour, title]) => `<rect x="${x(begin)}" width="${Math.max(x(end) - x(begin), 1)}" height="1" ` +
      `fill="${colour}"><title>${title}</title></rect>`).join("") + "</svg>");
  return `<div class="try-rows" role="img" aria-label="${description}">${bars.join("")}</div>` +
    `<p class="try-key">${key(entries)}</p>`;
}

// --- pages ---

const SIZES = ["64KiB", "128KiB", "256KiB", "512KiB", "1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "32MiB"];
const bytesOf = (text) => parseFloat(text) * (text.endsWith("KiB") ? 1024 : 1048576);
const CONTROLS = {  // a label, the least and the largest value, the usual first one, the value as the command has it
  bytes: ["Gradients", 1, 256, 25, (value) => `${value}MiB`],
  tensors: ["Tensors", 1, 200, 60, String],
  ranks: ["Ranks", 1, 16, 2, String],
  "bucket-size": ["Bucket size", 0, SIZES.length - 1, 4, (value) => SIZES[value]],
  "forward-ms": ["Forward, ms", 0, 200, 10, String],
  "backward-ms": ["Backward, ms", 0, 200, 20, String],
  "micro-batches": ["Micro-batches", 1, 32, 8, String],
};
function candidatesTable({ best, candidates }) {
  const rows = candidates.map((each) => [each.size === null ? "per tensor" : formatSize(each.size), each.buckets.length,
    formatSize(Math.max(...each.buckets)), milliseconds(each.seconds), each === best ? "recommended" : ""]);
  return [["bucket size", "buckets", "largest", "predicted step ms", ""], rows];
}
const recommended = (set, overlap) =>
  recommend(equalTensors(set.bytes, set.tensors), set.cost, set.forward, set.backward, overlap);
const PAGES = {  // each begins with values that show its effect
  buckets: {
    controls: ["bytes", "tensors", "ranks"], first: { bytes: 1, tensors: 200 },
    show(set) {
      const found = recommended(set, false), most = found.candidates.map((each) => {
        const latency = each.buckets.length * set.cost(0);
        return [each.size === null ? "per tensor" : formatSize(each.size), [[0, latency, ORANGE, "latencies"],
          [latency, each.seconds, BLUE, "moving and adding"]]];
      });
      return [candidatesTable(found), drawing(most, "All-reduces of a step by bucket size: latencies, then moving",
        [[ORANGE, "latencies"], [BLUE, "moving and adding"]])];
    },
  },
  overlap: {
    controls: ["bytes", "tensors", "ranks", "forward-ms", "backward-ms"], flags: ["overlap"],
    first: { "forward-ms": 20, "backward-ms": 40 },
    show(set) {
      const found = recommended(set, set.overlap), { turns } = found.best, computing = set.forward + set.backward;
      const work = [[0, set.forward, GREEN, "forward"], [set.forward, computing, SKY, "backward"]];
      const rows = [["computing", work],
        ["buckets", turns.map(({ begin, end }, at) => [begin, end, at % 2 ? ORANGE : BLUE, `bucket ${at}`])]];
      const alone = [computing, recommended(set, false).best.seconds, BLUE, "all-reduces"];
      if (set.overlap) rows.push(["without overlap", [...work, alone]]);
      return [candidatesTable(found), drawing(rows, "A step with the recommended buckets: computing above, buckets below",
        [[GREEN, "forward"], [SKY, "backward"], [BLUE, "an all-reduce"], [ORANGE, "the next one"]])];
    },
  },
  zero: {
    controls: ["bytes", "tensors", "ranks", "bucket-size"], first: { ranks: 16 },
    show(set) {
      const stages = memoryOf(equalTensors(set.bytes, set.tensors), set.ranks, set.bucketSize);
      const names = ["parameters", "gradients", "optimizer state", "in flight"], colours = [GREEN, BLUE, ORANGE, GREY];
      const rows = stages.map((use, stage) => {
        let end = 0;
        return [`stage ${stage}`, use.map((nbytes, at) => [end, end += nbytes, colours[at], names[at]])];
      });
      return [[["ZeRO", ...names, "together"], stages.map((use, at) => [at, ...use.map(formatSize), formatSize(sum(use))])],
        drawing(rows, "A rank's memory in each stage of ZeRO", names.map((name, at) => [colours[at], name]))];
    },
  },
  pipeline: {
    controls: ["bytes", "tensors", "ranks", "forward-ms", "backward-ms", "micro-batches"], first: { ranks: 4 },
    show(set) {
      const rows = [["data parallel", 1, "", milliseconds(recommended(set, false).best.seconds), ""]], drawn = [];
      for (const [name, chunks] of [["gpipe", 1], ["1f1b", 1], ["interleaved", 2]]) {
        if (!(set.forward > 0 && set.backward > 0) || (name === "interleaved" && set.micro % set.ranks)) continue;
        const found = pipelineOf(name, set.ranks, set.micro, chunks, set.forward, set.backward);
        rows.push([name, found.stages, percent(found.idle), milliseconds(found.seconds), found.kept]);
        if (name === "1f1b") drawn.push(found);
      }
      const ranks = drawn.flatMap(({ turns }) => Array.from({ length: set.ranks }, (_, rank) => [`rank ${rank}`,
        turns.filter((turn) => turn.rank === rank).map(({ begin, end, forward, m }) => [begin, end,
          forward ? (m % 2 ? SKY : BLUE) : (m % 2 ? "#e69f00" : ORANGE), `${forward ? "forward" : "backward"} of ${m}`])]));
      return [[["layers divided by", "stages", "idle", "predicted step ms", "activations kept"], rows],
        ranks.length ? drawing(ranks, "1F1B: the forwards and backwards of each rank; the rest is idle",
          [[BLUE, "forward"], [ORANGE, "backward"]]) : ""];
    },
  },
};

function start(place) {
  const page = PAGES[place.dataset.try], flags = page.flags ?? [];
  let measured = read(place.querySelector("script").textContent), file = "bench.json";
  const controls = page.controls.map((name) => {
    const [text, least, most, usual] = CONTROLS[name], first = page.first[name] ?? usual;
    return `<label>${text} <input type="range" name="${name}" min="${least}" max="${most}" value="${first}"><output></output></label>`;
  }).join("") + flags.map((name) => `<label><input type="checkbox" name="${name}" checked> --${name}</label>`).join("");
  place.innerHTML = `<form>${controls}<label>A file of clcomm bench --json <input type="file" accept=".json"></label></form>
    <p role="status"></p><div class="try-drawing"></div><div class="table-wrapper" tabindex="0" role="region" aria-label="Predictions">
    <table class="docutils"></table></div><p>The command that prints these numbers:</p><pre tabindex="0"><code></code></pre>`;
  const form = place.querySelector("form"), status = place.querySelector("[role=status]");
  // What a page has no control for is as the command's default.
  const value = (name) => form.elements[name] ? Number(form.elements[name].value)
    : name.endsWith("-ms") ? 0 : CONTROLS[name][3];

  function show() {
    for (const name of page.controls)
      form.elements[name].nextElementSibling.value = CONTROLS[name][4](value(name));
    try {
      const set = { bytes: value("bytes") * 1048576, tensors: value("tensors"), ranks: value("ranks"),
        bucketSize: bytesOf(SIZES[value("bucket-size")]), forward: value("forward-ms") / 1e3,
        backward: value("backward-ms") / 1e3, micro: value("micro-batches"), overlap: form.elements.overlap?.checked };
      set.cost = costOf(measured, set.ranks);
      const [[heads, rows], picture] = page.show(set);
      const cells = (tag, texts) => `<tr>${texts.map((text) => `<${tag}>${text}</${tag}>`).join("")}</tr>`;
      place.querySelector("table").innerHTML =
        `<thead>${cells("td", heads)}</thead><tbody>${rows.map((row) => cells("td", row)).join("")}</tbody>`;
      place.querySelector(".try-drawing").innerHTML = picture;
      const short = (number) => Number(number.toPrecision(3));
      status.textContent = `${file}: each all-reduce costs ${short(measured.alpha * 1e6)} us plus ` +
        `${short(measured.beta * 1048576e3)} ms per MiB (${measured.ranks} ranks, ` +
        `${measured.transport === "mpi" ? "through MPI" : measured.transport}).`;
      const options = [...page.controls.map((name) => `--${name} ${CONTROLS[name][4](value(name))}`),
        ...flags.filter((name) => form.elements[name].checked).map((name) => `--${name}`)];
      place.querySelector("code").replaceChildren(...["clcomm tune", `--from ${file}`, ...options].flatMap((text, at) =>
        [at ? " " : "", Object.assign(document.createElement("span"), { textContent: text })]));
    } catch (error) {
      status.textContent = error.message;
    }
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", show);
  form.querySelector("[type=file]").addEventListener("change", async ({ target }) => {
    if (!target.files.length) return;
    try {
      measured = read(await target.files[0].text());
      file = target.files[0].name;
      if (form.elements.ranks) form.elements.ranks.value = measured.ranks;
      show();
    } catch (error) {
      status.textContent = error instanceof SyntaxError ? `${target.files[0].name} is no JSON.` : error.message;
    }
  });
  show();
}
document.querySelectorAll("[data-try]").forEach(start);
