//! The load tool: calls on one keep-alive connection, in a separate process.

use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::shown;

/// Cycles through the bodies. The path comes as argument; a path that is no verb has no body.
const SCRIPT: &str = r#"
local requests, at = {}, 0
init = function(args)
  if not args[1]:find("^/v1/") then
    requests[1] = wrk.format("GET", args[1])
    return
  end
  for body in io.lines(os.getenv("BODIES")) do
    requests[#requests + 1] = wrk.format("POST", args[1], {["Content-Type"] = "application/json"}, body)
  end
end
request = function()
  at = at % #requests + 1
  return requests[at]
end
done = function(summary, latency, _)
  io.write(string.format("figures %f %f %d %d\n", latency:percentile(50), latency:percentile(99),
    summary.requests, summary.errors.status + summary.errors.timeout))
end
"#;

/// Runs for each figure: the middle one counts.
const RUNS: usize = 3;

/// What a verb takes, in microseconds.
#[derive(Clone, Copy)]
pub(crate) struct Took {
    pub(crate) median: f64,
    pub(crate) p99: f64,
}

impl Took {
    /// For a cell of the table.
    pub(crate) fn shown(self) -> String {
        format!("{}, p99 {}", shown(self.median), shown(self.p99))
    }
}

/// The load tool, with a folder of its own.
pub(crate) struct Wrk {
    folder: TempDir,
}

impl Wrk {
    /// `None` if it is not installed.
    pub(crate) fn find() -> Option<Self> {
        Command::new("wrk").arg("-v").output().ok()?;
        let folder = tempfile::tempdir().expect("there is room for temporary files");
        std::fs::write(folder.path().join("ask.lua"), SCRIPT).expect("the folder is writable");
        Some(Self { folder })
    }

    /// Sends these bodies from now on.
    pub(crate) fn ask(&self, bodies: Vec<Vec<u8>>) {
        let lines = bodies.into_iter();
        let lines: Vec<String> =
            lines.map(|body| String::from_utf8(body).expect("JSON is text")).collect();
        std::fs::write(self.folder.path().join("bodies"), lines.join("\n"))
            .expect("the folder is writable");
    }

    /// Times of a path of the extender at `address`, one call after the other for some seconds. `None` if
    /// a run has no result: the figure would be that of the good times.
    pub(crate) fn measure(&self, address: &str, path: &str) -> Option<Took> {
        let runs: Vec<Took> = (0..RUNS).map(|_| self.run(address, path)).collect::<Option<_>>()?;
        let middle = |of: fn(&Took) -> f64| {
            let mut all: Vec<f64> = runs.iter().map(of).collect();
            all.sort_unstable_by(f64::total_cmp);
            all[RUNS / 2]
        };
        Some(Took { median: middle(|run| run.median), p99: middle(|run| run.p99) })
    }

    fn run(&self, address: &str, path: &str) -> Option<Took> {
        let run = Command::new("wrk")
            .env("BODIES", self.folder.path().join("bodies"))
            .args(["-t1", "-c1", "-d4s", "--timeout", "10s", "-s"])
            .arg(self.folder.path().join("ask.lua"))
            .args([&format!("http://{address}"), "--", path])
            .stderr(Stdio::inherit())
            .output();
        let out = String::from_utf8(run.ok()?.stdout).ok()?;
        let figures = out.lines().find_map(|line| line.strip_prefix("figures "))?;
        let numbers: Vec<f64> =
            figures.split(' ').filter_map(|number| number.parse().ok()).collect();
        let [median, p99, requests, errors] = numbers[..] else { return None };
        assert!(errors == 0.0, "{requests} calls, {errors} of them failed: {out}");
        // Where others take all of the machine, not one call may come through.
        (requests > 0.0).then_some(Took { median, p99 })
    }
}
