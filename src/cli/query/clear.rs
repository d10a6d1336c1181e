//! `gpupack clear`: the agent forgets the faults of past events on one GPU.

use std::time::Duration;

use clap::Args;

use crate::base::connect;
use crate::base::connect::{Server, ServerArgs};
use crate::base::failure::Failure;
use crate::base::plain::{LookArgs, Output, json, print, table};
use wire::api::commands::{ClearRequest, Cleared};
use wire::api::condition::{ClearResult, DeviceFault};
use wire::api::state::{Device, DeviceKind, State};
use wire::ids::is_name;

/// Most calls for one order: one waits for 5 s, and an order ends within a minute.
const MOST_CALLS: u32 = 40;

/// Pause after a call that no leader answered.
const PAUSE: Duration = Duration::from_secs(1);

/// Most such calls in a row: a new leader answers within seconds.
const MOST_UNANSWERED: u32 = 15;

/// Flags of `gpupack clear`.
#[derive(Debug, Args)]
pub struct ClearArgs {
    /// Node of the GPU
    node: String,
    /// The GPU, by index or UUID
    gpu: String,
    /// Form of the output.
    #[command(flatten)]
    look: LookArgs,
    /// Address of the extender.
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `gpupack clear`, until the outcome is known.
///
/// # Errors
/// The GPU is not known or keeps its fault, or its agent does not answer in time.
pub fn run(args: &ClearArgs) -> Result<(), Failure> {
    connect::run(async {
        let ClearArgs { node, gpu, look, server } = args;
        if !is_name(node) {
            return Err(Failure::usage(format!("`{node}` is not a valid node name")));
        }
        let server = server.connect().await?;
        let state: State = server.ask(&format!("/v1/state?node={node}")).await?;
        let devices: Vec<&Device> = state.nodes.iter().flat_map(|node| &node.devices).collect();
        let cleared = outcome(&server, node, &found(&devices, node, gpu)?).await?;
        print(&match look.output {
            Output::Json => json(&cleared)?,
            Output::Table => text(&cleared),
        });
        verdict(&cleared)
    })
}

/// The UUID of the GPU that a user names.
fn found(devices: &[&Device], node: &str, named: &str) -> Result<String, Failure> {
    let is_index = !named.is_empty() && named.bytes().all(|byte| byte.is_ascii_digit());
    let is_named = |device: &Device| match is_index {
        true => device.kind != DeviceKind::MigInstance && Ok(device.index) == named.parse::<u32>(),
        false => device.id == named,
    };
    let mut all = devices.iter().filter(|device| is_named(device));
    let device = all.next();
    if all.next().is_some() {
        return Err(Failure::usage(format!("`{named}` names several GPUs: name the UUID")));
    }
    match device {
        Some(device) if device.kind == DeviceKind::MigInstance => {
            Err(Failure::usage(format!("`{named}` is a MIG instance: name its GPU")))
        }
        Some(device) => Ok(device.id.clone()),
        None => Err(Failure::not_found(format!("node `{node}` has no GPU `{named}`"))),
    }
}

/// Gives the order, and waits for its outcome. While no replica leads, it tries again.
async fn outcome(server: &Server, node: &str, gpu: &str) -> Result<Cleared, Failure> {
    let path = format!("/v1/gpus/{gpu}");
    let mut request = ClearRequest { node: node.to_owned(), ..ClearRequest::default() };
    let mut unanswered = 0;
    for _ in 0..MOST_CALLS {
        match server.order::<_, Cleared>(&path, &request).await {
            Ok(cleared) if cleared.result.is_some() => return Ok(cleared),
            Ok(cleared) => (unanswered, request.order) = (0, Some(cleared.order)),
            Err(failure) if failure.is_passing() && unanswered < MOST_UNANSWERED => {
                unanswered += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Err(failure) => return Err(failure),
        }
    }
    Err(Failure::unreachable("the order does not end: look at the logs of the extender"))
}

fn text(cleared: &Cleared) -> String {
    let result = cleared.result.map_or_else(|| "-".to_owned(), |result| format!("{result:?}"));
    let fault = cleared.fault.map_or_else(|| "-".to_owned(), |fault| format!("{fault:?}"));
    let row = vec![cleared.node.clone(), cleared.gpu.clone(), result, fault];
    table(&["NODE", "GPU", "RESULT", "FAULT"], &[], vec![row])
}

/// How the command ends.
fn verdict(cleared: &Cleared) -> Result<(), Failure> {
    let Cleared { node, gpu, result, fault, .. } = cleared;
    match (result, fault) {
        (Some(ClearResult::Cleared | ClearResult::NothingToClear), _) => Ok(()),
        (
            Some(ClearResult::Refused),
            Some(fault @ (DeviceFault::Xid | DeviceFault::Unavailable)),
        ) => Err(Failure::other(format!(
            "`{gpu}` of node `{node}` has the fault `{fault:?}` by a later event than was known when the order \
                 was given: check it again, then clear it again"
        ))),
        (Some(ClearResult::Refused), Some(fault)) => Err(Failure::other(format!(
            "`{gpu}` of node `{node}` still has the fault `{fault:?}`: docs/agent.md says what ends it"
        ))),
        (Some(ClearResult::Refused), None) => Err(Failure::other(format!(
            "the agent of node `{node}` does not see `{gpu}`: is it still there?"
        ))),
        (Some(ClearResult::NoAnswer), _) => Err(Failure::unreachable(format!(
            "the agent of node `{node}` did not answer within 60 s: check it, or whether it is older \
             than this command; it may still have cleared `{gpu}`"
        ))),
        (Some(ClearResult::Other) | None, _) => {
            Err(Failure::other("the outcome is one that only a newer gpupack knows"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::api::kind::{ApiVersion, ClearedKind};

    #[test]
    fn the_exit_code_says_whether_the_gpu_may_take_tenants() {
        let cleared = |result, fault| Cleared {
            api_version: ApiVersion::default(),
            kind: ClearedKind::default(),
            node: "n".to_owned(),
            gpu: "GPU-a".to_owned(),
            order: "7-1".to_owned(),
            result: Some(result),
            fault,
        };
        for (result, fault, code, part) in [
            (ClearResult::Refused, Some(DeviceFault::ResetRequired), 1, "`ResetRequired`"),
            (ClearResult::Refused, Some(DeviceFault::Xid), 1, "later event"),
            (ClearResult::Refused, None, 1, "does not see `GPU-a`"),
            (ClearResult::NoAnswer, None, 4, "within 60 s"),
            (ClearResult::Other, None, 1, "newer"),
        ] {
            let failure = verdict(&cleared(result, fault)).unwrap_err();
            assert!(failure.exit_code() == code && failure.to_string().contains(part), "{failure}");
        }
        for result in [ClearResult::Cleared, ClearResult::NothingToClear] {
            assert!(verdict(&cleared(result, None)).is_ok());
        }
        let text = text(&cleared(ClearResult::Refused, Some(DeviceFault::Lost)));
        assert_eq!(text, "NODE  GPU    RESULT   FAULT\nn     GPU-a  Refused  Lost\n");
    }
}
