"use strict";
// Everything goes into the page as text, never as HTML: names and reasons come from other machines.

const size = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
};
const age = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
const since = (ms) => age(Math.max(0, (Date.now() - ms) / 1000));

function cell(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function fillTable(id, columns, rows) {
  const head = document.createElement("tr");
  head.append(...columns.map((name) => cell("th", name)));
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((text) => cell("td", String(text ?? ""))));
    return line;
  });
  const table = document.getElementById(id);
  if (rows.length) table.replaceChildren(head, ...lines);
  else table.replaceChildren(cell("caption", "none"));
}

function showStatus(s) {
  document.getElementById("name").textContent = s.name || s.node.slice(0, 12);
  const health = document.getElementById("health");
  health.className = s.health.state;
  health.textContent = [s.health.state, ...s.health.reasons].join("; ");
  const rows = [
    ["node", s.node], ["run", s.run], ["listens on", s.listen], ["up", age(s.uptime_s)],
    ["trainer", s.trainer ? `process ${s.trainer.pid} ${s.trainer.label}` : "none"],
  ];
  if (s.clock) {
    const length = s.clock.round_length ? ` of ${s.clock.round_length}` : "";
    rows.push(["training", `outer ${s.clock.outer_step}, inner ${s.clock.inner_step}${length}, ${s.clock.steps_per_s.toFixed(2)} steps/s`]);
  }
  if (s.work_at_risk_s !== null) rows.push(["work at risk", age(s.work_at_risk_s)]);
  document.getElementById("node").replaceChildren(...rows.flatMap(([k, v]) => [cell("dt", k), cell("dd", v)]));
}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function refresh() {
  try {
    const [status, peers, snapshots, recoveries] = await Promise.all([
      get("api/v1/status"), get("api/v1/peers"), get("api/v1/snapshots"), get("api/v1/recoveries"),
    ]);
    showStatus(status);
    fillTable("peers", ["node", "name", "address", "outer", "inner", "state"], peers.peers.map((p) => [
      (p.node || "").slice(0, 12), p.name, (p.addresses || [])[0], p.clock?.outer_step, p.clock?.inner_step,
      p.error || (p.live ? "live" : "known"),
    ]));
    fillTable("snapshots", ["id", "kind", "outer", "inner", "step", "size", "age"], snapshots.snapshots.reverse().map((x) => [
      x.snapshot_id, x.kind, x.outer_step, x.inner_step, x.training_step, size(x.bytes), since(x.time_ms),
    ]));
    fillTable("recoveries", ["when", "action", "outer", "inner", "bytes", "donors", "agreement", "why"],
      recoveries.recoveries.reverse().map((r) => [
        `${since(r.finished_ms)} ago`, r.action, r.report.outer_step, r.report.inner_step, size(r.report.bytes),
        Object.keys(r.report.donors).length, r.report.agreement, r.report.reason,
      ]));
  } catch (error) {
    const health = document.getElementById("health");
    health.className = "red";
    health.textContent = `no answer: ${error.message}`;
  }
  setTimeout(refresh, 2000);
}

refresh();
