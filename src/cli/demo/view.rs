//! What the demo shows while it runs: a table that is drawn anew in place on a terminal, a line a
//! second elsewhere.

use std::fmt::Write as _;
use std::io;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use crate::cli::demo::board::{Board, Figures, Latency, PodCounts};
use crate::control::shared::app::App;
use crate::metrics::labels::Verb;
use crate::scoring::fragmentation::Packing;

/// Time between two drawings.
const EVERY: Duration = Duration::from_secs(1);

/// How the present state is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// A table, redrawn in place.
    Table,
    /// One line a second.
    Lines,
    /// Nothing before the end.
    Nothing,
}

impl Look {
    /// The table on a terminal, lines elsewhere.
    pub(crate) fn of_stdout() -> Self {
        if io::stdout().is_terminal() { Self::Table } else { Self::Lines }
    }
}

/// Shows the present state until it is dropped. Ends when nobody reads any more.
pub(crate) async fn show(app: &App, board: &Board, look: Look) {
    if look == Look::Nothing {
        return std::future::pending().await;
    }
    let mut drawn_lines = 0;
    loop {
        let time = app.clock.precise();
        let packing = app.ledger.packing();
        let figures = board.figures().clone();
        let text = match look {
            Look::Table => {
                let table = table(time, &packing, &figures);
                // Up to the first line of the last drawing, and wipe from there to the end.
                let again = if drawn_lines > 0 {
                    format!("\x1b[{drawn_lines}A\x1b[J")
                } else {
                    String::new()
                };
                drawn_lines = table.lines().count();
                again + &table
            }
            Look::Lines | Look::Nothing => line(time, &packing, &figures),
        };
        if print(&text).is_err() {
            return std::future::pending().await;
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Writes to stdout at once.
///
/// # Errors
/// Nobody reads.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn table(time: Duration, packing: &Packing, figures: &Figures) -> String {
    let PodCounts { arrived, placed, waiting, refused, ended, withdrawn, .. } = figures.pods;
    let mut text = String::new();
    let rows = [
        format!("  time          {}", clock_face(time)),
        format!(
            "  pods          {arrived} arrived, {placed} placed, {waiting} waiting, \
             {refused} refused"
        ),
        format!("                {ended} ended, {withdrawn} gave up waiting"),
        format!(
            "  GPUs          {} occupied, {} empty, {} overbooked",
            packing.occupied,
            packing.devices - packing.occupied,
            packing.overbooked
        ),
        format!(
            "  allocation    {:>5} %   packing efficiency {:>5} %   fragmentation {:>5} %",
            percent(packing.allocation().millionths()),
            percent(packing.efficiency().millionths()),
            percent(packing.fragmentation().millionths())
        ),
    ];
    for row in rows {
        let _ = writeln!(text, "{row}");
    }
    text + &latencies(figures)
}

/// One aligned row per verb.
pub(crate) fn latencies(figures: &Figures) -> String {
    let mut text = format!(
        "  {:<12}{:>12}{:>12}{:>12}{:>12}\n",
        "verb", "calls", "p50 µs", "p99 µs", "max µs"
    );
    for verb in [Verb::Filter, Verb::Prioritize, Verb::Bind] {
        let Latency { calls, p50_us, p99_us, max_us } = figures.latency(verb);
        let _ =
            writeln!(text, "  {:<12}{calls:>12}{p50_us:>12}{p99_us:>12}{max_us:>12}", verb.label());
    }
    text
}

fn line(time: Duration, packing: &Packing, figures: &Figures) -> String {
    let pods = figures.pods;
    let of = |verb| {
        let latency = figures.latency(verb);
        format!("{}/{}", latency.p50_us, latency.p99_us)
    };
    format!(
        "{} pods: {} arrived {} placed {} waiting {} refused | GPUs: {} occupied {} empty {} \
         overbooked | allocation {} % efficiency {} % fragmentation {} % | p50/p99 µs: filter {} \
         prioritize {} bind {}\n",
        clock_face(time),
        pods.arrived,
        pods.placed,
        pods.waiting,
        pods.refused,
        packing.occupied,
        packing.devices - packing.occupied,
        packing.overbooked,
        percent(packing.allocation().millionths()),
        percent(packing.efficiency().millionths()),
        percent(packing.fragmentation().millionths()),
        of(Verb::Filter),
        of(Verb::Prioritize),
        of(Verb::Bind),
    )
}

/// Hours, minutes and seconds.
fn clock_face(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// Millionths in percent with one decimal.
pub(crate) fn percent(millionths: u64) -> String {
    decimal(millionths, 10_000)
}

/// `amount` in units of `unit`, with one decimal, rounded.
pub(crate) fn decimal(amount: u64, unit: u64) -> String {
    let tenths = amount.saturating_mul(10).saturating_add(unit / 2) / unit;
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_rounded_and_times_read() {
        assert_eq!(percent(0), "0.0");
        assert_eq!(percent(912_499), "91.2");
        assert_eq!(percent(912_500), "91.3");
        assert_eq!(percent(1_000_000), "100.0");
        assert_eq!(clock_face(Duration::from_secs(3_725)), "01:02:05");
    }

    #[test]
    fn the_table_fits_80_columns() {
        let text = table(Duration::ZERO, &Packing::default(), &Figures::default());
        assert!(text.lines().all(|line| line.chars().count() <= 78), "{text}");
    }
}
