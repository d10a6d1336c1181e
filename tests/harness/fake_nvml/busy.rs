//! Calls wait for the driver while it changes a GPU.
//!
//! While a call that makes or removes instances takes its time (`delays_ms`), all other calls for that GPU and its
//! instances wait, in every process. A switch of its MIG mode by others takes `switch_ms` from the time when the scenario
//! was written, and calls for the GPU wait so long, too. What the library knows itself (UUID, name, index) waits for nothing.

use std::fs::File;
use std::time::Duration;

use super::scenario::{self, Scenario};

/// The calls that change a GPU.
const CHANGES: [&str; 4] = [
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
];

/// The calls that do not reach the driver.
const KNOWN: [&str; 3] = ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetIndex"];

/// Held while a call for a GPU goes on; a change is alone.
pub(crate) struct Turn(#[expect(dead_code, reason = "it is open")] Option<File>);

/// Waits until the driver takes this call for the GPU at this position.
pub(crate) fn wait(symbol: &str, position: usize) -> Turn {
    if KNOWN.contains(&symbol) {
        return Turn(None);
    }
    let (Some(path), Some(scenario)) = (scenario::path(), scenario::current()) else {
        return Turn(None);
    };
    let Some(gpu) = scenario.gpus.get(position) else { return Turn(None) };
    wait_for_switch(gpu.switch_ms);
    let file = path.with_file_name(format!("busy-{position}"));
    let file = match is_slow_change(&scenario, symbol) {
        true => File::create(file).inspect(|file| drop(file.lock())),
        false => File::open(file).inspect(|file| drop(file.lock_shared())),
    };
    Turn(file.ok())
}

fn is_slow_change(scenario: &Scenario, symbol: &str) -> bool {
    CHANGES.contains(&symbol) && scenario.delays_ms.get(symbol).is_some_and(|delay| *delay > 0)
}

fn wait_for_switch(switch_ms: u64) {
    if switch_ms == 0 {
        return;
    }
    let written = scenario::path().and_then(|path| path.metadata().ok()?.modified().ok());
    let age = written.and_then(|written| written.elapsed().ok()).unwrap_or_default();
    std::thread::sleep(Duration::from_millis(switch_ms).saturating_sub(age));
}
