//! Holds the code against the import table of `docs/ARCHITECTURE.md`: layers look only downwards, and
//! what each may use is written down once, there.

use std::collections::{BTreeMap, BTreeSet};

use source::{SourceFile, Word, files, words};

mod source;

/// The document with the tables.
const ARCHITECTURE: &str = include_str!("../docs/ARCHITECTURE.md");

/// Heading of the table of modules.
const MODULES: &str = "Module";

/// Heading of the table of foreign crates and other words that are bound to places.
const WORDS: &str = "Word";

/// Words that a layer may not even mention, each with the reason. Tests inside it may.
const UNSAYABLE: [(&str, &[&str], &str); 2] = [
    (
        "src/packing/",
        &[
            "tokio",
            "async",
            "await",
            "Instant",
            "SystemTime",
            "rand",
            "rand_chacha",
            "tracing",
            "Mutex",
            "RwLock",
            "DashMap",
            "serde",
            "serde_json",
            "axum",
            "kube",
            "k8s_openapi",
            "f32",
        ],
        "packing is pure: values in, verdict out",
    ),
    (
        "src/ledger/",
        &[
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
        ],
        "the ledger knows no wire format, no clock, no chance and never waits for I/O",
    ),
];

/// Modules (rows) with what each may use, in the order of the rows.
type Table = Vec<(String, BTreeSet<String>)>;

/// Reads the Markdown table whose first column has this heading.
fn table(document: &str, heading: &str) -> Table {
    let start = format!("| {heading} |");
    let rows = document.lines().skip_while(|line| !line.starts_with(&start));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|');
        let mut ticked = || {
            let cell = cells.next().unwrap_or_default();
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()
        };
        let name = ticked().pop().unwrap_or_default();
        (name, ticked().into_iter().collect())
    })
    .collect()
}

/// The Rust files that the map of the document names: the first cells of the table of files.
fn mapped_files(document: &str) -> BTreeSet<&str> {
    let rows = document.lines().skip_while(|line| !line.starts_with("| File |"));
    let rows = rows.take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let ticked = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    ticked.filter(|path| path.ends_with(".rs")).collect()
}

/// The Rust files of the product.
fn product(files: &[SourceFile]) -> impl Iterator<Item = &SourceFile> {
    files.iter().filter(|file| file.path.starts_with("src/") && file.path.ends_with(".rs"))
}

/// The top-level module that a file of `src` belongs to; `lib` for the list of modules itself.
fn module_of(path: &str) -> &str {
    let path = path.strip_prefix("src/").expect("a path below src");
    path.split('/').next().unwrap_or_default().trim_end_matches(".rs")
}

/// Depth of a file in the tree of modules: 1 for `src/clock.rs`, 2 for `src/ledger/books.rs`.
fn depth_of(path: &str) -> usize {
    path.split('/').count() - 1
}

/// The words of a file outside its test modules.
fn without_tests(words: &[Word]) -> Vec<&Word> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let is_tests = matches!(&words[at..], [first, second, third, ..]
            if first.text == "mod" && second.text == "tests" && third.text == "{");
        if is_tests {
            let mut open = 0_usize;
            for word in &words[at + 2..] {
                at += 1;
                match word.text.as_str() {
                    "{" => open += 1,
                    "}" if open == 1 => break,
                    "}" => open -= 1,
                    _ => {}
                }
            }
            at += 2;
        } else {
            kept.push(&words[at]);
            at += 1;
        }
    }
    kept
}

/// The top-level modules that a file uses: what follows `crate::` (or `gpupack::` in `main`), also in
/// braces, and what follows enough `super`s to reach the top.
fn imports(path: &str, words: &[&Word]) -> BTreeMap<String, usize> {
    let text = |at: usize| words.get(at).map_or("", |word| word.text.as_str());
    let mut found = BTreeMap::new();
    let mut inner: Vec<bool> = Vec::new();
    for at in 0..words.len() {
        match text(at) {
            "{" => inner.push(at >= 2 && text(at - 2) == "mod"),
            "}" => {
                inner.pop();
            }
            "crate" | "gpupack" if text(at + 1) == "::" => {
                first_names(words, at + 2, &mut found);
            }
            "super" if at < 2 || text(at - 2) != "super" => {
                let supers = (0..).take_while(|n| text(at + 2 * n) == "super").count();
                let depth = depth_of(path) + inner.iter().filter(|is_mod| **is_mod).count();
                if supers >= depth {
                    first_names(words, at + 2 * supers, &mut found);
                }
            }
            _ => {}
        }
    }
    found
}

/// The name at `at`, or the first names in the braces there.
fn first_names(words: &[&Word], at: usize, found: &mut BTreeMap<String, usize>) {
    let Some(first) = words.get(at) else { return };
    if first.text != "{" {
        found.insert(first.text.clone(), first.line);
        return;
    }
    let mut open = 0_usize;
    let mut is_first = true;
    for word in &words[at..] {
        match word.text.as_str() {
            "{" => open += 1,
            "}" if open == 1 => return,
            "}" => open -= 1,
            "," if open == 1 => is_first = true,
            name if open == 1 && is_first => {
                found.insert(name.to_owned(), word.line);
                is_first = false;
            }
            _ => {}
        }
    }
}

/// Modules that `lib.rs` declares at its top, test modules left out.
fn declared(words: &[Word]) -> BTreeSet<String> {
    let mut open = 0_usize;
    let mut found = BTreeSet::new();
    for (at, word) in words.iter().enumerate() {
        match word.text.as_str() {
            "{" => open += 1,
            "}" => open -= 1,
            "mod" if open == 0 => {
                found.insert(words[at + 1].text.clone());
            }
            _ => {}
        }
    }
    found
}

/// Everything in which the code differs from the table.
fn differences(
    table: &Table,
    declared: &BTreeSet<String>,
    used: &BTreeMap<String, BTreeMap<String, String>>,
) -> Vec<String> {
    let mut faults = Vec::new();
    let rows: BTreeMap<_, _> = table.iter().map(|(name, allowed)| (name, allowed)).collect();
    for missing in declared.iter().filter(|module| !rows.contains_key(module)) {
        faults.push(format!("`{missing}` is declared in lib.rs and missing in the table"));
    }
    for (position, (module, allowed)) in table.iter().enumerate() {
        if module != "main" && !declared.contains(module) {
            faults.push(format!("`{module}` is in the table and not in lib.rs"));
        }
        let none = BTreeMap::new();
        let used = used.get(module).unwrap_or(&none);
        for (import, place) in used.iter().filter(|(import, _)| !allowed.contains(*import)) {
            faults.push(format!("{place}: `{module}` may not use `{import}`"));
        }
        for stale in allowed.iter().filter(|import| !used.contains_key(*import)) {
            faults.push(format!("the table lets `{module}` use `{stale}`, and nobody does"));
        }
        let below: BTreeSet<_> = table[position + 1..].iter().map(|(name, _)| name).collect();
        for upwards in allowed.iter().filter(|import| !below.contains(import)) {
            faults.push(format!("`{module}` looks up or sideways at `{upwards}`"));
        }
    }
    faults
}

/// Places where a word stands that is bound to other places.
fn strays(table: &Table, path: &str, words: &[Word]) -> Vec<String> {
    let mut faults = Vec::new();
    for (word, places) in table {
        if places.iter().any(|place| path.starts_with(place.as_str())) {
            continue;
        }
        for found in words.iter().filter(|found| found.text == *word) {
            faults.push(format!("{path}:{}: `{word}` belongs to {places:?} alone", found.line));
        }
    }
    faults
}

/// Words that a layer may not mention.
fn unsayable(path: &str, words: &[&Word]) -> Vec<String> {
    let mut faults = Vec::new();
    for (layer, banned, reason) in UNSAYABLE.iter().filter(|row| path.starts_with(row.0)) {
        for word in words.iter().filter(|word| banned.contains(&word.text.as_str())) {
            faults.push(format!("{path}:{}: `{}` in {layer}: {reason}", word.line, word.text));
        }
    }
    faults
}

#[test]
fn modules_use_what_the_table_allows_and_nothing_else() {
    let modules = table(ARCHITECTURE, MODULES);
    let mut used: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut in_lib = BTreeSet::new();
    for file in product(&files()) {
        let words = words(&file.text);
        let module = module_of(&file.path);
        if module == "lib" {
            in_lib = declared(&words);
            continue;
        }
        let words: Vec<&Word> = words.iter().collect();
        for (import, line) in imports(&file.path, &words) {
            if import != module {
                let place = format!("{}:{line}", file.path);
                used.entry(module.to_owned()).or_default().entry(import).or_insert(place);
            }
        }
    }
    let faults = differences(&modules, &in_lib, &used);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_map_names_every_file_and_no_other() {
    let files = files();
    let is_mapped = |path: &&str| !path.ends_with("/tests.rs") && !path.ends_with("/fixture.rs");
    let exist: BTreeSet<&str> = product(&files)
        .filter_map(|file| file.path.strip_prefix("src/"))
        .filter(is_mapped)
        .collect();
    let mapped = mapped_files(ARCHITECTURE);
    let missing: Vec<_> = exist.difference(&mapped).collect();
    let stale: Vec<_> = mapped.difference(&exist).collect();
    assert!(missing.is_empty() && stale.is_empty(), "lacks {missing:?}, still has {stale:?}");
}

#[test]
fn foreign_crates_and_special_words_stay_in_their_places() {
    let bound = table(ARCHITECTURE, WORDS);
    let mut faults = Vec::new();
    let mut found = BTreeSet::new();
    for file in files().iter().filter(|file| file.path.ends_with(".rs")) {
        let words = words(&file.text);
        found.extend(words.iter().map(|word| word.text.clone()));
        let is_product = file.path.starts_with("src/");
        let bound = bound.iter().filter(|(word, _)| is_product || word == "unsafe");
        faults.extend(strays(&bound.cloned().collect(), &file.path, &words));
    }
    let stale = bound.iter().filter(|(word, _)| !found.contains(word));
    faults.extend(stale.map(|(word, _)| format!("the table binds `{word}`, and nobody uses it")));
    assert!(!bound.is_empty() && faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn pure_layers_mention_nothing_impure() {
    let mut faults = Vec::new();
    for file in product(&files()) {
        if file.path.ends_with("/tests.rs") || file.path.ends_with("/fixture.rs") {
            continue;
        }
        faults.extend(unsayable(&file.path, &without_tests(&words(&file.text))));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[cfg(test)]
mod scanner {
    use super::*;

    fn imported(path: &str, text: &str) -> Vec<String> {
        let words = words(text);
        imports(path, &words.iter().collect::<Vec<_>>()).into_keys().collect()
    }

    #[test]
    fn words_leave_out_comments_texts_and_characters() {
        let text = "// crate::a\nlet x: &'a str = \"crate::b\\\" c\"; /* /* d */ e */ r#\"f\"g\"#; \
                    b'\\''; 'h'; b\"i\" 'é' j";
        let found: Vec<_> = words(text).into_iter().map(|word| word.text).collect();
        let kept: Vec<_> =
            found.iter().filter(|word| word.chars().all(char::is_alphanumeric)).collect();
        assert_eq!(kept, ["let", "x", "a", "str", "b", "j"], "{found:?}");
        assert_eq!(words("\n\n\"\n\" x")[0].line, 4);
    }

    #[test]
    fn imports_are_found_in_every_form() {
        let path = "src/ledger/books.rs";
        assert_eq!(imported(path, "use crate::clock::Clock;"), ["clock"]);
        assert_eq!(imported(path, "use crate::{a, b::{c, d}, e::f};"), ["a", "b", "e"]);
        assert_eq!(imported(path, "let x = crate::sim::go();"), ["sim"]);
        assert_eq!(imported(path, "use super::reports::X; use super::super::config;"), ["config"]);
        assert_eq!(imported(path, "mod t { use super::super::x; }"), Vec::<String>::new());
        assert_eq!(imported(path, "mod t { use super::super::super::y; }"), ["y"]);
        assert_eq!(imported(path, "pub(crate) fn f() {} // crate::z"), Vec::<String>::new());
        assert_eq!(imported("src/main.rs", "use gpupack::cli;"), ["cli"]);
        assert_eq!(imported("src/clock.rs", "use super::config;"), ["config"]);
    }

    #[test]
    fn the_map_is_read_from_the_first_cells() {
        let text =
            "`no.rs`\n| File | Duty |\n|---|---|\n| `a.rs`, `b/c.rs` | like `d.rs` |\n\n| `e.rs` |";
        assert_eq!(mapped_files(text), BTreeSet::from(["a.rs", "b/c.rs"]));
    }

    #[test]
    fn tests_inside_a_file_are_left_out() {
        let words = words("fn a() {} mod tests { fn b() { { } } } fn c() {}");
        let kept: Vec<_> = without_tests(&words).iter().map(|word| word.text.as_str()).collect();
        assert_eq!(kept.concat(), "fna(){}fnc(){}");
    }

    #[test]
    fn every_kind_of_difference_is_told() {
        let text = "| Module | May use |\n|---|---|\n| `top` | `low`, `old` |\n| `gone` | |\n\
                    | `low` | `top` |\n\nrest";
        let modules = table(text, "Module");
        let declared = BTreeSet::from(["top", "low", "new"].map(str::to_owned));
        let place = |text: &str| (text.to_owned(), "f:1".to_owned());
        let used = BTreeMap::from([
            ("top".to_owned(), BTreeMap::from([place("low"), place("new")])),
            ("low".to_owned(), BTreeMap::from([place("top")])),
        ]);
        assert_eq!(
            differences(&modules, &declared, &used),
            [
                "`new` is declared in lib.rs and missing in the table",
                "f:1: `top` may not use `new`",
                "the table lets `top` use `old`, and nobody does",
                "`top` looks up or sideways at `old`",
                "`gone` is in the table and not in lib.rs",
                "`low` looks up or sideways at `top`",
            ]
        );
        assert_eq!(super::declared(&words("pub mod a; mod b { pub mod c; }")).len(), 2);
    }

    #[test]
    fn words_out_of_place_are_told() {
        let bound =
            table("| Word | Only in |\n|---|---|\n| `unsafe` | `src/agent/nvml.rs` |", "Word");
        let words = words("fn f() { unsafe { Mutex } }");
        assert_eq!(strays(&bound, "src/agent/nvml.rs", &words), Vec::<String>::new());
        assert_eq!(strays(&bound, "src/agent/run.rs", &words).len(), 1);
        let words: Vec<_> = words.iter().collect();
        assert_eq!(unsayable("src/packing/fit.rs", &words).len(), 1);
        assert_eq!(unsayable("src/ledger/books.rs", &words), Vec::<String>::new());
    }
}
