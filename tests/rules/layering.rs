//! Enforces what the compiler does not: within a crate a file imports only files that are above it in
//! its `lib.rs`. So there are no import circles, neither of files nor of folders. Which crate may use which
//! is in the `Cargo.toml` of each.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{SourceFile, Word, files, words};

/// The folders of our crates.
const CRATES: [&str; 10] = [
    "src/wire/",
    "src/runtime/",
    "src/engine/",
    "src/kube_api/",
    "src/control/",
    "src/server/",
    "src/agent/",
    "src/sim/",
    "src/cli/",
    "src/lab/",
];

/// Most Rust files in one folder of `src`: beyond them it is two modules.
const MOST_IN_A_FOLDER: usize = 12;

/// What decides is pure: no file of these mentions any of these words, tests aside.
const PURE: [&str; 7] = [
    "src/engine/",
    "src/wire/api/",
    "src/wire/units",
    "src/wire/ids",
    "src/wire/device",
    "src/wire/seen",
    "src/server/rotation/",
];

/// Clocks, chance, input and output, and formats.
const IMPURE: [&str; 13] = [
    "tokio",
    "async",
    "await",
    "Instant",
    "SystemTime",
    "rand",
    "rand_chacha",
    "serde",
    "serde_json",
    "axum",
    "kube",
    "k8s_openapi",
    "f32",
];

/// What the deterministic simulation runs as it is shipped.
const CORE: [&str; 2] = ["src/control/", "src/runtime/step"];

/// Paths to time, chance, threads, and input and output: module, and what of it, or all.
const OUTSIDE: [(&str, &str); 13] = [
    ("tokio", "fs"),
    ("tokio", "net"),
    ("tokio", "process"),
    ("tokio", "spawn"),
    ("tokio", "task"),
    ("tokio", "time"),
    ("std", "fs"),
    ("std", "net"),
    ("std", "process"),
    ("thread", "sleep"),
    ("thread", "spawn"),
    ("kube", ""),
    ("rand", ""),
];

/// Where `lib.rs` lists each file, as its path of modules.
type Order = BTreeMap<Vec<String>, usize>;

/// The files that `lib.rs` lists, fixtures of tests left out.
fn order(lib: &[Word]) -> Order {
    let text = |at: usize| lib.get(at).map_or("", |word| word.text.as_str());
    let mut modules: Vec<String> = Vec::new();
    let mut found = Order::new();
    for at in 0..lib.len() {
        match text(at) {
            "mod" if text(at + 2) == "{" => modules.push(text(at + 1).to_owned()),
            "mod" if !is_of_tests(lib, at) => {
                let path = modules.iter().cloned().chain([text(at + 1).to_owned()]).collect();
                found.insert(path, found.len());
            }
            "}" => {
                modules.pop();
            }
            _ => {}
        }
    }
    found
}

/// Whether the `mod` at `at` has the attribute `#[cfg(test)]`, or one with a feature beside, with any
/// visibility and other attributes.
fn is_of_tests(words: &[Word], at: usize) -> bool {
    let before = words[..at].iter().rev().map(|word| word.text.as_str());
    let own: Vec<&str> = before.take_while(|word| ![";", "{", "}"].contains(word)).collect();
    own.contains(&"cfg") && own.contains(&"test")
}

/// The words of a file outside its test modules.
fn without_tests(words: &[Word]) -> Vec<&Word> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let is_block = words.get(at + 2).is_some_and(|word| word.text == "{");
        if words[at].text == "mod" && is_block && is_of_tests(words, at) {
            at = end_of_block(words, at + 2);
        } else {
            kept.push(&words[at]);
            at += 1;
        }
    }
    kept
}

/// Where the block that opens at `at` is over.
fn end_of_block(words: &[Word], at: usize) -> usize {
    let mut open = 0_usize;
    for (end, word) in words.iter().enumerate().skip(at) {
        match word.text.as_str() {
            "{" => open += 1,
            "}" if open == 1 => return end + 1,
            "}" => open -= 1,
            _ => {}
        }
    }
    words.len()
}

/// The paths below the crate that a text names, trees of `use` unfolded, each with its line.
fn paths(words: &[&Word]) -> Vec<(Vec<String>, usize)> {
    let mut found = Vec::new();
    for at in 0..words.len() {
        let is_path = words.get(at + 1).is_some_and(|word| word.text == "::");
        if words[at].text == "crate" && is_path {
            unfold(words, at + 2, &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Reads the path or the tree of `use` at `at`, which continues `path`; returns where it is over.
fn unfold(
    words: &[&Word],
    mut at: usize,
    path: &mut Vec<String>,
    found: &mut Vec<(Vec<String>, usize)>,
) -> usize {
    let own = path.len();
    while let Some(word) = words.get(at) {
        if word.text == "{" {
            at += 1;
            while words.get(at).is_some_and(|word| word.text != "}") {
                at = if words[at].text == "," { at + 1 } else { unfold(words, at, path, found) };
            }
            path.truncate(own);
            return at + 1;
        }
        path.push(word.text.clone());
        at += 1;
        if words.get(at).is_none_or(|next| next.text != "::") {
            found.push((path.clone(), word.line));
            break;
        }
        at += 1;
    }
    while words.get(at).is_some_and(|word| word.text == "as") {
        at += 2;
    }
    path.truncate(own);
    at
}

/// The listed file that a path leads into.
fn file_of<'a>(order: &'a Order, path: &[String]) -> Option<(&'a Vec<String>, usize)> {
    (1..=path.len()).find_map(|length| {
        order.get_key_value(&path[..length]).map(|(file, position)| (file, *position))
    })
}

/// The folder of the crate that a file belongs to.
fn crate_of(path: &str) -> Option<&'static str> {
    CRATES.into_iter().find(|folder| path.starts_with(folder))
}

/// The path of modules of a file of `src`, in its crate.
fn modules_of(path: &str) -> Vec<String> {
    let path = path.trim_start_matches(crate_of(path).unwrap_or_default()).trim_end_matches(".rs");
    path.split('/').map(str::to_owned).collect()
}

/// The Rust files of our libraries but `lib.rs`.
fn library(files: &[SourceFile]) -> impl Iterator<Item = &SourceFile> {
    files.iter().filter(|file| {
        let name = crate_of(&file.path).and_then(|folder| file.path.strip_prefix(folder));
        file.path.ends_with(".rs")
            && name.is_some_and(|name| !["lib.rs", "main.rs"].contains(&name))
    })
}

/// Those of the crate in this folder.
fn library_of<'f>(
    files: &'f [SourceFile],
    folder: &'static str,
) -> impl Iterator<Item = &'f SourceFile> {
    library(files).filter(move |file| crate_of(&file.path) == Some(folder))
}

/// What a listed file imports that stands below it, and ways to name it that do not show where it stands.
fn upward(order: &Order, path: &str, text: &str) -> Vec<String> {
    let Some(own) = order.get(&modules_of(path)) else { return Vec::new() };
    let words = words(text);
    let words = without_tests(&words);
    let mut faults = Vec::new();
    for (import, line) in paths(&words) {
        match file_of(order, &import) {
            Some((_, position)) if position <= *own => {}
            Some((file, _)) => faults
                .push(format!("{path}:{line}: `{}` stands below it in lib.rs", file.join("::"))),
            None => faults.push(format!("{path}:{line}: `{}` is no file", import.join("::"))),
        }
    }
    let relative = words.iter().filter(|word| word.text == "super");
    faults.extend(relative.map(|word| format!("{path}:{}: begin paths with `crate`", word.line)));
    faults
}

fn tree(files: &[SourceFile], folder: &str) -> Order {
    let lib = files.iter().find(|file| file.path == format!("{folder}lib.rs"));
    order(&words(&lib.expect("there is a library").text))
}

#[test]
fn a_file_imports_only_files_above_it() {
    let files = files();
    for folder in CRATES {
        let order = tree(&files, folder);
        let faults: Vec<String> = library_of(&files, folder)
            .flat_map(|file| upward(&order, &file.path, &file.text))
            .collect();
        assert!(order.len() >= 5 && faults.is_empty(), "{folder}: {}", faults.join("\n"));
    }
}

#[test]
fn every_file_is_listed_or_a_test_of_one_that_is() {
    let files = files();
    let texts: BTreeMap<&str, &str> =
        library(&files).map(|file| (file.path.as_str(), file.text.as_str())).collect();
    let is_test = |path: &str| {
        let (folder, name) = path.trim_end_matches(".rs").rsplit_once('/').unwrap_or_default();
        let parent = texts.get(format!("{folder}.rs").as_str());
        parent.is_some_and(|text| {
            let words = words(text);
            (0..words.len()).any(|at| {
                let is_it = words.get(at + 1).is_some_and(|word| word.text == name);
                words[at].text == "mod" && is_it && is_of_tests(&words, at)
            })
        }) || name.ends_with("fixture")
    };
    for folder in CRATES {
        let order = tree(&files, folder);
        let lost: Vec<&str> = library_of(&files, folder)
            .map(|file| file.path.as_str())
            .filter(|path| !order.contains_key(&modules_of(path)) && !is_test(path))
            .collect();
        assert!(lost.is_empty(), "not in {folder}lib.rs: {lost:?}");
    }
}

/// What is shipped knows nothing of the lab.
#[test]
fn only_the_lab_and_its_tests_name_the_lab() {
    let files = files();
    let outside = files.iter().filter(|file| {
        let is_its_own = ["src/lab/", "tests/lab/"].iter().any(|own| file.path.starts_with(own));
        file.path.ends_with(".rs") && !is_its_own
    });
    let names = |file: &&SourceFile| words(&file.text).iter().any(|it| it.text == "gpupack_lab");
    let found: Vec<&str> = outside.filter(names).map(|file| file.path.as_str()).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_folder_has_a_dozen_files_at_most() {
    let files = files();
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for (folder, _) in library(&files).filter_map(|file| file.path.rsplit_once('/')) {
        *folders.entry(folder).or_default() += 1;
    }
    folders.retain(|_, count| *count > MOST_IN_A_FOLDER);
    assert_eq!(folders, BTreeMap::new(), "make two modules of it");
}

#[test]
fn decision_code_uses_nothing_impure() {
    let impure = BTreeSet::from(IMPURE);
    let mut faults = Vec::new();
    for file in library(&files()) {
        let modules = modules_of(&file.path);
        let is_test = modules.iter().any(|module| module == "tests" || module.ends_with("fixture"));
        if is_test || !PURE.iter().any(|pure| file.path.starts_with(pure)) {
            continue;
        }
        let words = words(&file.text);
        let found = without_tests(&words);
        // The types of the bodies of `/v1` are declared for this format.
        let is_of_wire = file.path.starts_with("src/wire/");
        let is_format = |word: &Word| is_of_wire && word.text == "serde";
        let found =
            found.iter().filter(|word| impure.contains(word.text.as_str()) && !is_format(word));
        faults.extend(found.map(|word| format!("{}:{}: `{}`", file.path, word.line, word.text)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// What a text has of [`OUTSIDE`], and choices by chance, each with its line.
fn outside_of(text: &str) -> Vec<(usize, String)> {
    let words = words(text);
    let words = without_tests(&words);
    let text = |at: usize| words.get(at).map_or("", |word| word.text.as_str());
    let is_found = |at: &usize| {
        let path = (text(*at), text(at + 2));
        let is_outside = OUTSIDE.contains(&path) || OUTSIDE.contains(&(path.0, ""));
        let is_by_chance = path == ("select", "{") && text(at + 3) != "biased";
        is_outside && text(at + 1) == "::" || is_by_chance
    };
    let found = (0..words.len()).filter(is_found);
    found.map(|at| (words[at].line, format!("{} {}", text(at), text(at + 2)))).collect()
}

/// The simulation runs these as they are shipped: whatever they wait for, time and chance are the test's.
#[test]
fn the_control_core_waits_for_the_outside_alone() {
    let mut faults = Vec::new();
    for file in library(&files()) {
        let modules = modules_of(&file.path);
        let is_core = CORE.iter().any(|core| file.path.starts_with(core));
        if !is_core || modules.iter().any(|module| module == "tests") {
            continue;
        }
        let found = outside_of(&file.text).into_iter();
        faults.extend(found.map(|(line, it)| format!("{}:{line}: `{it}`", file.path)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[cfg(test)]
mod scanner {
    use super::*;

    fn upward_of(path: &str, text: &str) -> usize {
        let lib =
            "pub mod a; /// R\n pub mod r { pub mod b; #[cfg(test)] mod f; pub(crate) mod c; }";
        upward(&order(&words(lib)), path, text).len()
    }

    #[test]
    fn what_the_core_must_not_wait_for_is_found() {
        for (text, count) in [
            ("use tokio::sync::Notify;", 0),
            ("tokio::select! { biased; () = a => {} }", 0),
            ("tokio::select! { () = a => {} }", 1),
            ("tokio::time::sleep(a).await", 1),
            ("std::thread::yield_now()", 0),
            ("std::thread::spawn(a); kube::Client::default()", 2),
            ("#[cfg(test)] mod tests { use std::fs::read; }", 0),
        ] {
            assert_eq!(outside_of(text).len(), count, "{text}");
        }
    }

    #[test]
    fn word_extraction_skips_comments_strings_and_characters() {
        let text = "// crate::a\nlet x: &'a str = \"crate::b\\\" c\"; /* /* d */ e */ r#\"f\"g\"#; \
                    b'\\''; 'h'; b\"i\" 'é' j";
        let found: Vec<_> = words(text).into_iter().map(|word| word.text).collect();
        let kept: Vec<_> =
            found.iter().filter(|word| word.chars().all(char::is_alphanumeric)).collect();
        assert_eq!(kept, ["let", "x", "a", "str", "b", "j"], "{found:?}");
        assert_eq!(words("\n\n\"\n\" x")[0].line, 4);
    }

    #[test]
    fn files_are_listed_in_order_without_those_of_tests() {
        let text = "pub mod a; #[cfg(test)] pub(crate) mod t; mod r { #[cfg(x)] pub mod b; }";
        let found: Vec<String> = order(&words(text)).keys().map(|path| path.join("/")).collect();
        assert_eq!(found, ["a", "r/b"]);
    }

    #[test]
    fn every_form_of_upward_import_is_detected() {
        for fault in [
            "use crate::r::c::X;",
            "use crate::{a, r::{b, c}};",
            "use crate::r::{b::{X, Y as Z}, c::W};",
            "fn f() { crate::r::c::g() }",
            "use crate::unknown::X;",
            "use super::c::X;",
        ] {
            assert_eq!(upward_of("src/wire/r/b.rs", fault), 1, "{fault}");
        }
        for fine in [
            "use crate::a::X; use crate::r::b::Y;",
            "use crate::{a::{X, Y}, r::b::{self, Z}};",
            "// use crate::r::c::X;",
            "#[cfg(test)] mod tests { use crate::r::c::X; use super::*; } fn f() {}",
            "pub(crate) fn f() {}",
        ] {
            assert_eq!(upward_of("src/wire/r/b.rs", fine), 0, "{fine}");
        }
        assert_eq!(upward_of("src/wire/r/c.rs", "use crate::r::b::X;"), 0);
        assert_eq!(
            upward_of("src/wire/r/b/tests.rs", "use crate::r::c::X;"),
            0,
            "tests look anywhere"
        );
    }
}
