//! The page in a real, headless browser, against a running demo (feature `page`). What is done there is
//! in `check.mjs`. Where Node.js, npm or Chromium is missing it says `skipped: …` and passes, unless
//! `GPUPACK_PAGE_REQUIRED` is set.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names that Chromium goes by.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Where a program is, if it is.
fn program(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Says that the test is skipped, past the capture of the test harness: it must be seen.
fn skipped(why: &str) {
    assert!(std::env::var_os("GPUPACK_PAGE_REQUIRED").is_none(), "the page is not tested: {why}");
    let _ = writeln!(std::io::stderr(), "skipped: the page in a real browser because {why}");
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

#[test]
fn the_page_works_in_a_browser() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page");
    let browser = BROWSERS.into_iter().find_map(program);
    let (Some(node), Some(npm), Some(browser)) = (program("node"), program("npm"), browser) else {
        return skipped("`node`, `npm` or `chromium` is not installed");
    };
    if let Err(why) = install(&npm, &folder) {
        return skipped(&why);
    }
    // The pipe ends with this process, and with it the browser and the demo.
    let mut check = Command::new(node)
        .arg(folder.join("check.mjs"))
        .env("GPUPACK", env!("CARGO_BIN_EXE_gpupack"))
        .env("CHROMIUM", browser)
        .stdin(Stdio::piped())
        .spawn()
        .expect("node starts");
    let _pipe = check.stdin.take();
    let status = check.wait().expect("node ends");
    assert!(status.success(), "the page fails in the browser: {status}");
}
