//! Starts a script of this folder with Node.js and Chromium, for the test of the page and for scenarios.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names that Chromium goes by.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Where a program is, if it is.
fn program(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// The packages of the lock file, installed once.
fn install(npm: &Path, folder: &Path) -> Result<(), String> {
    if folder.join("node_modules/playwright-core/package.json").is_file() {
        return Ok(());
    }
    let flags = ["ci", "--ignore-scripts", "--no-audit", "--no-fund"];
    let output = Command::new(npm).args(flags).current_dir(folder).output();
    let output = output.map_err(|error| format!("npm does not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    if output.status.success() { Ok(()) } else { Err(format!("`npm ci` failed: {last}")) }
}

/// Runs a script with these variables to its end, which must be a good one.
///
/// # Errors
/// Why this machine cannot.
pub(crate) fn run(script: &str, variables: &[(&str, &str)]) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page");
    let browser = BROWSERS.into_iter().find_map(program);
    let (Some(node), Some(npm), Some(browser)) = (program("node"), program("npm"), browser) else {
        return Err("`node`, `npm` or `chromium` is not installed".to_owned());
    };
    install(&npm, &folder)?;
    // The pipe ends with this process, and with it the browser and what the script starts.
    let mut check = Command::new(node)
        .arg(folder.join(script))
        .envs(variables.iter().copied())
        .env("CHROMIUM", browser)
        .stdin(Stdio::piped())
        .spawn()
        .expect("node starts");
    let _pipe = check.stdin.take();
    let status = check.wait().expect("node ends");
    assert!(status.success(), "{script} fails in the browser: {status}");
    Ok(())
}
