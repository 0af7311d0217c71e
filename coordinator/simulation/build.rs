//! Makes the mutated machines: copies the machines and the simulation, and puts in every fault that a comment of the
//! machines names, each behind a switch. So all of them are built once, and the sources that ship hold only comments.

#![allow(clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Batches so small that a handful of nodes needs several.
const SMALL: [(&str, &str); 2] = [
    ("const BATCH: usize = 100;", "const BATCH: usize = 2;"),
    ("MOST_EVICTIONS: usize = 50;", "MOST_EVICTIONS: usize = 2;"),
];

/// Modules of the machines' crate that have no mutants, and are used unchanged: values that other crates share.
const REAL: [&str; 3] = ["job", "kv", "time"];

/// A fault in one line.
struct Mutant {
    /// Its name, and its test's. A fault in two lines has two comments with one name.
    name: String,
    /// The file and the line of the comment.
    place: String,
    /// A text that the next line has once.
    from: String,
    /// An expression that takes its place while the mutant is switched on; or, if it contains `ON`, the text that always
    /// does. `ON` is true while the mutant is switched on.
    to: String,
}

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let (machines, simulation) = (here.join("../rendezvous/src"), here.join("tests/simulation"));
    for watched in [&machines, &simulation] {
        println!("cargo::rerun-if-changed={}", watched.display());
    }
    let mut mutants = Vec::new();
    copy(&machines, &out.join("machines"), &mut |file, source| {
        let mut source = mutated(file, &source, &mut mutants);
        for (from, to) in SMALL {
            source = source.replace(from, to);
        }
        for module in REAL {
            source =
                source.replace(&format!("pub mod {module};\n"), &format!("pub use elastic_rendezvous::{module};\n"));
        }
        // The machines' own tests run in their own crate.
        let source = source.replace("crate::", "crate::machines::").replace("crate::machines::on(", "crate::on(");
        source
            .replace("cfg(test)", "cfg(any())")
            .replace("#[cfg(not(test))]\n", "")
            .replace("#![forbid(unsafe_code)]\n", "")
    });
    copy(&simulation, &out.join("simulation"), &mut |_, source| {
        source
            .replace("elastic_rendezvous::", "crate::machines::")
            .replace("elastic_node::requests::checkpoint", "crate::checkpoint")
    });

    let mut modules = module("machines", &out.join("machines/lib.rs"));
    for entry in fs::read_dir(&simulation).expect("the simulation is there").flatten() {
        let name = entry.file_name().to_string_lossy().trim_end_matches(".rs").to_owned();
        if name != "main" {
            let file = if entry.path().is_dir() { format!("{name}/mod.rs") } else { format!("{name}.rs") };
            modules += &module(&name, &out.join("simulation").join(file));
        }
    }
    fs::write(out.join("modules.rs"), modules).expect("OUT_DIR can be written");

    let mut table = "const MUTANTS: &[[&str; 4]] = &[\n".to_owned();
    for Mutant { name, place, from, to } in &mutants {
        writeln!(table, "    [{name:?}, {place:?}, {from:?}, {to:?}],").expect("a string takes all");
    }
    fs::write(out.join("table.rs"), table + "];\n").expect("OUT_DIR can be written");
    let names: BTreeSet<&String> = mutants.iter().map(|mutant| &mutant.name).collect();
    let tests: String =
        names.iter().map(|name| format!("#[test]\nfn {name}() {{\n    crate::found({name:?});\n}}\n")).collect();
    fs::write(out.join("tests.rs"), tests).expect("OUT_DIR can be written");
}

fn module(name: &str, file: &Path) -> String {
    format!("#[path = {:?}]\nmod {name};\n", file.display())
}

/// A source with the mutants put in that its comments name.
fn mutated(file: &str, source: &str, mutants: &mut Vec<Mutant>) -> String {
    let (mut out, mut waiting) = (String::new(), Vec::new());
    for (number, line) in source.lines().enumerate() {
        let place = format!("coordinator/rendezvous/src/{file}:{}", number + 1);
        if let Some(mark) = line.trim_start().strip_prefix("// mutant ") {
            let parts = mark.split_once(": ").and_then(|(name, change)| Some((name, change.split_once(" => ")?)));
            let Some((name, (from, to))) = parts else {
                panic!("{place} is no mutant: write `// mutant NAME: FROM => TO`")
            };
            waiting.push(Mutant { name: name.to_owned(), place, from: from.to_owned(), to: to.to_owned() });
            continue;
        }
        let mut line = line.to_owned();
        for mutant in waiting.drain(..) {
            let Mutant { name, place, from, to } = &mutant;
            let found = line.matches(from.as_str()).count();
            assert!(found == 1, "{place}: the mutant {name} changes `{from}`, which the next line has {found} times");
            let switch = format!("crate::on({name:?})");
            let changed = match to.contains("ON") {
                true => to.replace("ON", &switch),
                false => format!("(if {switch} {{ {to} }} else {{ {from} }})"),
            };
            line = line.replacen(from.as_str(), &changed, 1);
            mutants.push(mutant);
        }
        out += &line;
        out.push('\n');
    }
    out
}

/// Copies a folder. `change` gets each file's path within the folder and its text, and returns the new text.
fn copy(from: &Path, to: &Path, change: &mut dyn FnMut(&str, String) -> String) {
    fn walk(root: &Path, from: &Path, to: &Path, change: &mut dyn FnMut(&str, String) -> String) {
        fs::create_dir_all(to).expect("OUT_DIR can be written");
        for entry in fs::read_dir(from).expect("the sources are there").flatten() {
            let (path, target) = (entry.path(), to.join(entry.file_name()));
            if path.is_dir() {
                walk(root, &path, &target, change);
            } else {
                let within = path.strip_prefix(root).expect("it lies there").to_string_lossy().into_owned();
                let source = fs::read_to_string(&path).expect("the sources are there");
                fs::write(&target, change(&within, source)).expect("OUT_DIR can be written");
            }
        }
    }
    // What an earlier build left must not be taken for a source.
    let _ = fs::remove_dir_all(to);
    walk(from, from, to, change);
}
