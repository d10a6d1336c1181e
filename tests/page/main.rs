//! The page in a real, headless browser, against a running demo (feature `page`). What is done there is
//! in `check.mjs`. Where Node.js, npm or Chromium is missing it says `skipped: …` and passes, unless
//! `GPUPACK_PAGE_REQUIRED` is set.

mod browser;

use std::io::Write;

/// Says that the test is skipped, past the capture of the test harness: it must be seen.
fn skipped(why: &str) {
    assert!(std::env::var_os("GPUPACK_PAGE_REQUIRED").is_none(), "the page is not tested: {why}");
    let _ = writeln!(std::io::stderr(), "skipped: the page in a real browser because {why}");
}

#[test]
fn the_page_works_in_a_browser() {
    let variables = [("GPUPACK", env!("CARGO_BIN_EXE_gpupack"))];
    if let Err(why) = browser::run("check.mjs", &variables) {
        skipped(&why);
    }
}
