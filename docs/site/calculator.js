// The calculator of docs/calculator.md. The numbers are those of `logitless explain` and
// benchmarks/scale.py. tests/docs/test_calculator.py compares this file with the Python code.
//
// The functions from `chooseCut` to `cost` have the names and the constants of
// logitless/heads/choose_cut.py, logitless/heads/explain.py and benchmarks/scale.py. They cover
// the mean of a loss with gradients, over a head whose logits have the dtype of its hidden states.

const MIB = 2 ** 20
const ITEMSIZE = { bf16: 2, fp16: 2, fp32: 4 }

const WORKSPACE = 1024 * MIB
const TILE = 128
const PACK = 8
const SUM_ROWS = 540
const STATISTICS_COST = 0.15
const MIN_GAIN = 0.1
const SMALL = 512 * MIB
const SMALL_WORK = 2e11
const READ_WIDTH = 200
const ON_CHIP_WIDTH = 128
const ON_CHIP_VOCAB = 2 ** 31
const ON_CHIP_PAIRS = 2 ** 19
const UNIT = 64
const GEMMS = 3 // the least number of GEMMs for a mean with gradients

const SHARE = { flops: 674 / 989, copy: 4.23 / 4.8 }
const LATENCY = 15e-6
const GPUS = {
  h200: { flops: 674e12, copy: 4.23e12, link: 450e9, network: 50e9, node: 8 },
  b200: { flops: SHARE.flops * 2250e12, copy: SHARE.copy * 8e12, link: 900e9, network: 50e9, node: 8 },
}

const ceil = (a, b) => Math.ceil(a / b)

// The largest power of two that is at most x.
function powerBelow(x) {
  let power = 1
  while (2 * power <= x) power *= 2
  return power
}

function evenChunk(rows, room) {
  let most = Math.max(room, 1)
  if (most >= 8 * TILE) most = powerBelow(most)
  else if (most >= TILE) most -= most % TILE
  const even = ceil(rows, Math.max(ceil(rows, most), 1))
  return Math.max(Math.min(most, ceil(even, TILE) * TILE, rows), 1)
}

function evenColumns(vocab, room) {
  const most = room - (room % TILE)
  if (!most) return 0
  return ceil(ceil(vocab, ceil(vocab, most)), TILE) * TILE
}

function keptBlocks(rows, vocab, width, columns) {
  const kept = new Set()
  for (let block = 1; block < ceil(vocab, columns); block++) {
    if ((kept.size + 1) * rows <= block * width) kept.add(block)
  }
  return kept
}

function extraCost(head, cut) {
  if (cut.columns === null) {
    const rows = evenChunk(head.rows, cut.rows)
    return rows < head.rows ? SUM_ROWS / rows : 0
  }
  const groups = cut.rows < head.rows ? SUM_ROWS / cut.rows : 0
  const again = 1 - (cut.kept.size * cut.columns) / head.vocab
  return again + STATISTICS_COST + SUM_ROWS / cut.columns + groups
}

function defaultWorkspace(row) {
  return Math.min(Math.max(WORKSPACE, 1024 * row), 2 * WORKSPACE)
}

function chooseCut(head) {
  const row = ceil(head.vocab, PACK) * PACK * head.itemsize
  const limit = head.workspace ?? defaultWorkspace(row)
  let best = { rows: Math.max(Math.floor(limit / row), 1), columns: null, kept: new Set() }
  let least = extraCost(head, best) - MIN_GAIN
  if (head.workspace === null || least <= 0) return best
  for (let groups = 1; head.rows >= groups * TILE; groups *= 2) {
    const rows = ceil(head.rows, groups)
    const columns = evenColumns(head.vocab, Math.floor(limit / (rows * head.itemsize)))
    if (!columns) continue
    const keeps = groups === 1 && head.dtype !== "fp16"
    const kept = keeps ? keptBlocks(rows, head.vocab, head.width, columns) : new Set()
    const cut = { rows, columns, kept }
    const extra = extraCost(head, cut)
    if (extra < least) [best, least] = [cut, extra]
  }
  return best
}

function isSmall({ rows, width, vocab, dtype, itemsize, workspace }) {
  const limit = workspace === null ? SMALL : Math.min(SMALL, Math.floor(workspace / 4))
  const few = rows * vocab * (width + READ_WIDTH) <= SMALL_WORK
  return dtype !== "fp16" && few && rows * vocab * itemsize <= limit
}

function staysOnChip({ rows, width, vocab, itemsize }) {
  const narrow = width <= ON_CHIP_WIDTH && vocab <= ON_CHIP_VOCAB
  return itemsize === 2 && narrow && rows <= ON_CHIP_PAIRS
}

// How a loss is computed, as LinearLogits.explain() describes. `workspace` is in bytes, or null.
function explain({ rows, width, vocab, dtype, workspace = null }) {
  const itemsize = ITEMSIZE[dtype]
  const head = { rows, width, vocab, dtype, itemsize, workspace }
  const unit = 16 / itemsize
  const odd = vocab % unit > 0 && vocab > UNIT
  const all = { rows, columns: vocab, chunks: 1, blocks: 1, floor: GEMMS }
  const rest = odd ? vocab % UNIT : 0
  if (isSmall(head)) {
    const memory = rows * (odd ? ceil(vocab, unit) * unit : vocab) * itemsize
    return { ...all, way: "materialised", workspace: memory, gemms: GEMMS, share: 1, rest }
  }
  if (staysOnChip(head)) {
    const share = GEMMS / (GEMMS + 1)
    return { ...all, way: "on the chip", workspace: 0, gemms: GEMMS + 1, share, rest: 0 }
  }
  const cut = chooseCut(head)
  const chunk = cut.columns === null ? evenChunk(rows, cut.rows) : Math.max(Math.min(cut.rows, rows), 1)
  const columns = Math.min(cut.columns ?? vocab, vocab)
  const chunks = ceil(rows, chunk)
  const blocks = ceil(vocab, columns)
  const byRows = cut.columns === null
  let again = 0
  if (!byRows) {
    for (let block = 0; block < blocks - 1; block++) if (!cut.kept.has(block)) again += columns
  }
  return {
    way: byRows ? "rows" : chunks === 1 ? "columns" : "rows and columns",
    rows: chunk,
    columns,
    chunks,
    blocks,
    workspace: (byRows ? chunk * ceil(columns, PACK) * PACK : chunk * cut.columns) * itemsize,
    gemms: GEMMS + again / vocab,
    floor: GEMMS,
    share: GEMMS / (GEMMS + Math.max(extraCost(head, cut), 0)),
    rest,
  }
}

// Seconds and bytes of forward and backward on one of `tp` ranks, in bf16.
function cost(tokens, vocab, hidden, tp, gpu) {
  const columns = ceil(vocab, tp)
  const logits = tokens * columns * 2
  const link = tp <= gpu.node ? gpu.link : gpu.network
  const latency = tp === 1 ? 0 : LATENCY
  const rows = tokens * hidden * 2
  const found = {
    tp,
    products: (3 * 2 * tokens * hidden * columns) / gpu.flops,
    loss: (3 * logits) / gpu.copy,
    gather: latency + ((tp - 1) * tokens * 3 * 4) / link,
    reduce: latency + (((2 * (tp - 1)) / tp) * rows) / link,
    weight: 2 * columns * hidden * 2,
    hidden: 2 * rows,
    logits: Math.min(logits, WORKSPACE),
  }
  const times = ["products", "loss", "gather", "reduce"]
  found.limit = times.reduce((a, b) => (found[b] > found[a] ? b : a))
  found.time = times.reduce((sum, name) => sum + found[name], 0)
  found.memory = found.weight + found.hidden + found.logits
  return found
}

// Seconds of forward and backward on one GPU: the GEMMs at the speed that `explain` estimates, and
// the reading and writing of logits.
function seconds(head, gpu) {
  const { products, loss } = cost(head.rows, head.vocab, head.width, 1, gpu)
  return products / explain(head).share + loss
}

// Peak bytes of a loss beyond hidden states and weight, with the gradients of both. At the peak of
// PyTorch's cross_entropy, three tensors have the size of the logits: the log-softmax, its gradient
// and the gradient of the logits. Transformers computes the three tensors in fp32.
function memory(head) {
  const { rows, width, vocab, dtype } = head
  const itemsize = ITEMSIZE[dtype]
  const logits = rows * vocab * itemsize
  const gradients = (rows + vocab) * width * itemsize
  const explained = explain(head)
  const three = { transformers: 3 * rows * vocab * 4, pytorch: 3 * logits }
  return {
    logits,
    gradients,
    workspace: explained.workspace,
    transformers: Math.max(three.transformers, logits + gradients),
    pytorch: Math.max(three.pytorch, logits + gradients),
    logitless: explained.workspace + gradients,
  }
}

// The page.

const MODELS = {
  "Llama 3.2 1B": [2048, 128256],
  "Llama 3.1 8B": [4096, 128256],
  "Qwen3 0.6B": [1024, 151936],
  "Gemma 2 2B": [2304, 256000],
  "GPT-2": [768, 50257],
}
const NUMBERS = {
  batch: ["Sequences", 1],
  tokens: ["Tokens per sequence", 65536],
  width: ["Width of the hidden states", 2048],
  vocab: ["Vocabulary", 128256],
  workspace: ["Workspace in MiB (empty: default)", null],
}
const MOST = 1e9
const CHOICES = { dtype: ["Dtype", Object.keys(ITEMSIZE)], gpu: ["GPU", Object.keys(GPUS)] }
const LIMITS = {
  products: "the GEMMs, so the time depends on the FLOP/s of the GPU",
  loss: "reading and writing logits, so the time depends on the memory bandwidth of the GPU",
}

const count = x => x.toLocaleString("en-US")
const plural = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`

// Three digits, or whole numbers from 1,000.
function short(x) {
  return x >= 999.5 ? count(Math.round(x)) : String(Number(x.toPrecision(3)))
}

function size(bytes) {
  return bytes < 1024 * MIB ? `${short(bytes / MIB)} MiB` : `${short(bytes / 1024 / MIB)} GiB`
}

const ms = seconds => `${short(1e3 * seconds)} ms`

function check(label, value, text) {
  if (!Number.isSafeInteger(value) || value < 1 || value > MOST) {
    throw new RangeError(`${label} must be a whole number from 1 to ${count(MOST)}, got "${text}".`)
  }
  return value
}

// Checks the text of a field. Returns a whole number, or null for an empty workspace.
function parse(name, text) {
  if (name === "workspace" && text.trim() === "") return null
  const digits = text.replaceAll(",", "").trim()
  return check(NUMBERS[name][0], digits === "" ? NaN : Number(digits), text)
}

function textOfWay(e) {
  const texts = {
    materialised: "all logits at once, because the head is small. The loss can take four times this memory",
    "on the chip": "tiles of logits are computed on the chip, and are not written to memory",
    rows: `${plural(e.chunks, "chunk")} of ${plural(e.rows, "whole row")}`,
    columns: `${plural(e.blocks, "block")} of ${plural(e.columns, "column")} of all rows`,
    "rows and columns":
      `${plural(e.chunks, "group")} of ${plural(e.rows, "row")}, each in ` +
      `${plural(e.blocks, "block")} of ${plural(e.columns, "column")}`,
  }
  return texts[e.way]
}

// What the page shows for the texts of the fields.
function results(fields) {
  const given = Object.fromEntries(Object.keys(NUMBERS).map(n => [n, parse(n, fields[n])]))
  const { width, vocab } = given
  const rows = check("Sequences × tokens", given.batch * given.tokens, `${fields.batch} × ${fields.tokens}`)
  const workspace = given.workspace === null ? null : given.workspace * MIB
  const head = { rows, width, vocab, dtype: fields.dtype, workspace }
  const [explained, bytes] = [explain(head), memory(head)]
  const one = cost(rows, vocab, width, 1, GPUS[fields.gpu])
  return { head, explained, bytes, cost: one, seconds: seconds(head, GPUS[fields.gpu]), gpu: fields.gpu }
}

function bars({ bytes }) {
  const all = [
    ["Transformers: its loss copies the logits to fp32", bytes.transformers],
    ["PyTorch: F.cross_entropy of the logits", bytes.pytorch],
    ["logitless", bytes.logitless],
  ]
  const most = Math.max(...all.map(([, value]) => value))
  const lines = all.map(([name, value], i) => {
    const own = i === 2 ? ' class="ours"' : ""
    const share = `style="width: ${Math.max((100 * value) / most, 0.3).toFixed(1)}%"`
    return `<li${own}><span>${name}</span><b>${size(value)}</b><i ${share}></i></li>`
  })
  return `<ul class="bars">${lines.join("")}</ul>`
}

function details({ head, explained, bytes, cost, seconds, gpu }) {
  const lines = [
    ["Size of all logits", size(bytes.logits)],
    ["Gradients of hidden states and weight", `${size(bytes.gradients)}, part of the last bar`],
    ["Logits in memory at once, with logitless", size(explained.workspace)],
    ["Split of the logits", textOfWay(explained)],
    ["Number of GEMMs", short(explained.gemms)],
    ["Estimated speed", `${Math.round(100 * explained.share)} % of the speed of ${explained.floor} GEMMs alone`],
  ]
  if (head.dtype === "fp32") {
    lines.push(["Computed time", "not computed, because only the speed of 16-bit GEMMs is known"])
  } else {
    const share = `${Math.round(100 * explained.share)} %`
    const gemms = `${ms(cost.products)} of GEMMs at ${share} of their speed`
    const parts = `${gemms}, and ${ms(cost.loss)} for reading and writing logits`
    lines.push(["Computed time", `${ms(seconds)}: ${parts}`])
    lines.push(["Largest part of the time", LIMITS[cost.limit]])
    if (gpu !== "h200") lines.push(["Note", "The speeds of a B200 are assumed, not measured."])
    if (explained.way === "on the chip") {
      lines.push(["Note", "The computed time includes reading and writing logits in memory. This head writes no logits to memory."])
    }
  }
  return `<table><tbody>${lines.map(([a, b]) => `<tr><td><b>${a}</b></td><td>${b}</td></tr>`).join("")}</tbody></table>`
}

function ranks({ head, gpu }) {
  if (head.dtype === "fp32") return ""
  const rows = [1, 2, 4, 8].map(tp => {
    const c = cost(head.rows, head.vocab, head.width, tp, GPUS[gpu])
    const cells = [tp, ms(c.products), ms(c.loss), ms(c.gather + c.reduce), ms(c.time), size(c.memory)]
    return `<tr>${cells.map(cell => `<td>${cell}</td>`).join("")}</tr>`
  })
  const titles = ["GPUs that share the head", "GEMMs", "loss", "collectives", "sum", "memory per GPU: weight, hidden states, gradients, logits"]
  const top = `<tr>${titles.map(title => `<th>${title}</th>`).join("")}</tr>`
  const table = `<table><thead>${top}</thead><tbody>${rows.join("")}</tbody></table>`
  return `<h3>Several GPUs: computed time and memory</h3><div class="scroll">${table}</div>`
}

function command({ head, gpu }) {
  const workspace = head.workspace === null ? "" : ` --workspace ${head.workspace / MIB}`
  const sizes = `--rows ${head.rows} --width ${head.width} --vocab ${head.vocab}`
  const scale = `--tokens ${head.rows} --hidden ${head.width} --vocab ${head.vocab} --gpu ${gpu}`
  const lines = [`logitless explain ${sizes} --dtype ${head.dtype}${workspace}`]
  if (head.dtype !== "fp32") lines.push(`python -m benchmarks.scale ${scale}`)
  return `<pre><code>${lines.join("\n")}</code></pre>`
}

function start(place) {
  const models = ["", ...Object.keys(MODELS)].map(name => `<option>${name}</option>`).join("")
  const label = (text, field) => `<label><span>${text}</span>${field}</label>`
  const options = values => values.map(v => `<option>${v}</option>`).join("")
  place.innerHTML =
    "<form>" +
    label("Take the sizes of a model", `<select name="model">${models}</select>`) +
    Object.entries(NUMBERS)
      .map(([name, [text, value]]) =>
        label(text, `<input name="${name}" inputmode="numeric" value="${value ?? ""}">`))
      .join("") +
    Object.entries(CHOICES)
      .map(([name, [text, values]]) => label(text, `<select name="${name}">${options(values)}</select>`))
      .join("") +
    '</form><div class="results" aria-live="polite"></div>'
  const form = place.querySelector("form")
  const shown = place.querySelector(".results")

  function update() {
    const fields = Object.fromEntries(new FormData(form))
    try {
      const found = results(fields)
      shown.innerHTML =
        "<h3>Peak memory of the loss, forward and backward</h3>" + bars(found) + details(found) +
        ranks(found) + "<h3>Commands that print the same numbers</h3>" + command(found)
    } catch (error) {
      if (!(error instanceof RangeError)) throw error
      const line = document.createElement("p")
      line.className = "error"
      line.textContent = error.message
      shown.replaceChildren(line)
    }
  }

  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (form.elements[name]) form.elements[name].value = value
  }
  form.elements.model.addEventListener("change", event => {
    const sizes = MODELS[event.target.value]
    if (sizes) [form.elements.width.value, form.elements.vocab.value] = sizes
  })
  form.addEventListener("input", update)
  form.addEventListener("submit", event => event.preventDefault())
  update()
}

if (typeof module === "undefined") start(document.getElementById("calculator"))
else module.exports = { explain, cost, seconds, memory, results, GPUS }
