//! `gpupack doctor`: checks an installation, and says what to fix.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::base::connect;
use crate::base::connect::ServerArgs;
use crate::base::failure::Failure;
use crate::base::plain::{LookArgs, Mood, Output, json, painted, print, wrapped};
use crate::base::reader::Reader;
use crate::doctor::checks::checked;
use crate::doctor::cluster_facts::CheckPlan;
use crate::doctor::rights::Places;
use runtime::clock::Clock;
use wire::api::commands::{Check, CheckCounts, CheckState, Diagnosis};
use wire::api::kind::{ApiVersion, DiagnosisKind};
use wire::ids::is_name;

/// At least one problem.
const PROBLEMS: u8 = 1;

/// No problem, but not everything could be checked.
const INCOMPLETE: u8 = 3;

/// Flags of `gpupack doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Namespace of extender, webhook and scheduler
    #[arg(long, value_name = "NAMESPACE", default_value = "gpu-system", value_parser = namespace)]
    system_namespace: String,
    /// Namespace in which pods are tried: in a dry run, so none is created
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default", value_parser = namespace)]
    namespace: String,
    /// Configuration of kube-scheduler, where it is no ConfigMap: gpupack in place
    #[arg(long, value_name = "FILE")]
    scheduler_config: Option<PathBuf>,
    /// Also start a pod on each GPU node, in the namespace of the agents, that says what its container gets; it
    /// holds the smallest share, evicts no pod, and is removed
    #[arg(long)]
    probe: bool,
    /// End with 0 although something could not be checked
    #[arg(long)]
    accept_unchecked: bool,
    /// Form of the output.
    #[command(flatten)]
    look: LookArgs,
    /// Address of API server and extender.
    #[command(flatten)]
    server: ServerArgs,
}

fn namespace(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("it is no valid name of a namespace".to_owned()),
    }
}

/// Runs `gpupack doctor`; returns the exit code.
///
/// # Errors
/// The API server does not answer, or a file cannot be read.
pub fn run(args: &DoctorArgs, clock: Clock) -> Result<u8, Failure> {
    let mut code = 0;
    connect::run(async {
        let checks = diagnosed(args, clock).await?;
        let diagnosis = Diagnosis {
            api_version: ApiVersion::default(),
            kind: DiagnosisKind::default(),
            counts: counted(&checks),
            items: checks,
        };
        code = exit_code(diagnosis.counts, args.accept_unchecked);
        print(&match args.look.output {
            Output::Json => json(&diagnosis)?,
            Output::Table => text(&diagnosis, &args.look),
        });
        Ok(())
    })?;
    Ok(code)
}

async fn diagnosed(args: &DoctorArgs, clock: Clock) -> Result<Vec<Check>, Failure> {
    let scheduler_file = match &args.scheduler_config {
        None => None,
        Some(path) => Some(std::fs::read_to_string(path).map_err(|error| {
            Failure::usage(format!("cannot read `{}`: {error}", path.display()))
        })?),
    };
    let reader = Reader::connected(&args.server.api_server).await?;
    let server = args.server.connect().await?;
    let plan = CheckPlan {
        reader: &reader,
        server: &server,
        places: Places {
            system: args.system_namespace.clone(),
            agents: "gpupack-agents".to_owned(),
            trial: args.namespace.clone(),
        },
        scheduler_file,
        probes: args.probe,
        program: env!("CARGO_PKG_VERSION"),
        now_unix_seconds: i64::try_from(clock.unix_seconds()).unwrap_or(i64::MAX),
    };
    let bar = progress();
    let checks = checked(&plan, &|what| bar.set_message(format!("reading {what} …"))).await;
    bar.finish_and_clear();
    Ok(checks)
}

/// What is read now, on standard error, if that is a terminal.
fn progress() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn counted(checks: &[Check]) -> CheckCounts {
    let count_of = |state| checks.iter().filter(|check| check.state == state).count();
    CheckCounts {
        ok: count_of(CheckState::Ok),
        warning: count_of(CheckState::Warning),
        problem: count_of(CheckState::Problem),
        not_checked: count_of(CheckState::NotChecked),
    }
}

fn exit_code(counts: CheckCounts, accepts_unchecked: bool) -> u8 {
    match counts {
        CheckCounts { problem: 1.., .. } => PROBLEMS,
        CheckCounts { not_checked: 1.., .. } if !accepts_unchecked => INCOMPLETE,
        _ => 0,
    }
}

fn text(diagnosis: &Diagnosis, look: &LookArgs) -> String {
    let mut text = String::new();
    let arrow = if look.no_unicode { "             -> " } else { "             → " };
    for check in &diagnosis.items {
        let (word, mood) = match check.state {
            CheckState::Ok => ("ok", Mood::Good),
            CheckState::Warning => ("warning", Mood::Odd),
            CheckState::Problem => ("problem", Mood::Bad),
            CheckState::NotChecked => ("not checked", Mood::Odd),
        };
        let first = format!("{word:13}");
        let line = wrapped(&first, &format!("{}: {}", check.check, check.found));
        text += &match look.is_colored() {
            true => line.replacen(word, &painted(word, mood), 1),
            false => line,
        };
        if let Some(fix) = &check.fix {
            text += &wrapped(arrow, fix);
        }
    }
    let CheckCounts { ok, warning, problem, not_checked } = diagnosis.counts;
    let _ = writeln!(
        text,
        "\n{ok} ok, {warning} to look at, {problem} to fix, {not_checked} not checked"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_state_gives_the_exit_code() {
        let counts =
            |warning, problem, not_checked| CheckCounts { ok: 9, warning, problem, not_checked };
        for (counts, accepts, code) in [
            (counts(0, 0, 0), false, 0),
            (counts(3, 0, 0), false, 0),
            (counts(0, 0, 1), false, INCOMPLETE),
            (counts(0, 0, 1), true, 0),
            (counts(0, 1, 1), true, PROBLEMS),
        ] {
            assert_eq!(exit_code(counts, accepts), code, "{counts:?}");
        }
    }
}
