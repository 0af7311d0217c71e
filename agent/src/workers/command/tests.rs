//! The workers' command line, tested with real files and, if it is installed, Python's own template.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use proptest::prelude::*;

use super::*;

fn write(path: &Path, mode: u32) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn program(kind: ProgramKind, name: impl Into<OsString>) -> Program {
    Program { kind, name: name.into(), args: vec!["--x".into(), "${local_rank}/$rank".into()] }
}

fn env<'a>(pairs: &'a [(&'a str, &'a Path)]) -> impl Fn(&str) -> Option<OsString> + 'a {
    move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_os_str().to_owned())
}

/// The Python that is found in the folder `dir` for these variables by an agent that is installed at `agent` and called
/// by `called`; and what was passed over.
fn chosen(dir: &Path, agent: &str, called: &str, pairs: &[(&str, &str)]) -> (String, Option<String>) {
    let of = |name: &str| pairs.iter().find(|(key, _)| *key == name);
    let paths = |value: &str| value.split(':').map(|part| dir.join(part)).collect::<Vec<_>>();
    let env = |name: &str| of(name).map(|(_, value)| std::env::join_paths(paths(value)).unwrap());
    let called = if called.contains('/') { dir.join(called).into_os_string() } else { called.into() };
    let agent = AgentProgram { path: dir.join(agent), called };
    let command = WorkerCommand::resolve(&program(ProgramKind::Module, "train"), &env, Some(&agent)).unwrap();
    let python = command.program.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
    (python, command.passed_over)
}

#[test]
fn the_interpreter_is_the_one_that_torchrun_or_a_shell_would_find() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["named/py", "venv/bin/python", "venv/bin/python3", "conda/bin/python", "usr/python3", "usr/python"] {
        write(&dir.path().join(name), 0o755);
    }
    write(&dir.path().join("old/python"), 0o755);
    let found = |pairs: &[(&str, &str)]| chosen(dir.path(), "opt/elastic-agent", "opt/elastic-agent", pairs);
    let table: &[(&[(&str, &str)], &str)] = &[
        (&[("PYTHON_EXEC", "named/py"), ("VIRTUAL_ENV", "venv"), ("PATH", "usr")], "named/py"),
        (&[("VIRTUAL_ENV", "venv"), ("PATH", "venv/bin:usr")], "venv/bin/python3"),
        (&[("VIRTUAL_ENV", "venv"), ("CONDA_PREFIX", "conda"), ("PATH", "usr:venv/bin:conda/bin")], "usr/python3"),
        (&[("VIRTUAL_ENV", "venv"), ("CONDA_PREFIX", "conda"), ("PATH", "usr")], "venv/bin/python"),
        (&[("CONDA_PREFIX", "conda"), ("PATH", "usr")], "usr/python3"),
        (&[("CONDA_PREFIX", "conda"), ("PATH", "nothing")], "conda/bin/python"),
        (&[("PATH", "old")], "old/python"),
    ];
    for (pairs, python) in table {
        assert_eq!(found(pairs), ((*python).to_owned(), None), "{pairs:?}");
    }
    let (python, passed_over) = found(&[("VIRTUAL_ENV", "gone"), ("PATH", "usr")]);
    assert_eq!(python, "usr/python3");
    assert!(passed_over.is_some_and(|it| it.contains("VIRTUAL_ENV") && it.contains("gone/bin/python, which does not")));
}

#[test]
fn an_environment_that_holds_the_agent_has_the_interpreter_unless_it_is_the_agents_alone() {
    let dir = tempfile::tempdir().unwrap();
    for name in
        ["named/py", "active/bin/python", "usr/python3", "own/bin/python", "tool/bin/python", "plain/bin/python"]
    {
        write(&dir.path().join(name), 0o755);
    }
    for name in ["own", "tool"] {
        write(&dir.path().join(name).join("pyvenv.cfg"), 0o644);
        let site = dir.path().join(name).join("lib/python3.13/site-packages");
        write(&site.join("elastic_agent/__init__.py"), 0o644);
        write(&site.join("pip-25.0.dist-info/METADATA"), 0o644);
        write(&dir.path().join(name).join("bin/elastic-agent"), 0o755);
        std::fs::create_dir_all(dir.path().join("links").join(name)).unwrap();
        let link = dir.path().join("links").join(name).join("elastic-agent");
        std::os::unix::fs::symlink(dir.path().join(name).join("bin/elastic-agent"), link).unwrap();
    }
    write(&dir.path().join("own/lib/python3.13/site-packages/torch/__init__.py"), 0o644);
    write(&dir.path().join("broken/conda-meta"), 0o644);
    let found = |agent: &str, called: &str, pairs: &[(&str, &str)]| {
        chosen(dir.path(), &format!("{agent}/bin/elastic-agent"), called, pairs).0
    };

    let path = ("PATH", "links/own:links/tool:usr");
    let own = "own/bin/elastic-agent";
    assert_eq!(found("own", own, &[path]), "own/bin/python");
    assert_eq!(found("own", own, &[path, ("VIRTUAL_ENV", "active")]), "own/bin/python", "as torchrun there");
    assert_eq!(found("own", "elastic-agent", &[path]), "own/bin/python", "by a link on PATH");
    assert_eq!(found("own", own, &[("PYTHON_EXEC", "named/py")]), "named/py");
    assert_eq!(found("tool", "links/tool/elastic-agent", &[path]), "usr/python3", "a tool of its own");
    assert_eq!(found("tool", "elastic-agent", &[("PATH", "links/tool:usr")]), "usr/python3");
    assert_eq!(found("tool", "elastic-agent", &[("PATH", "tool/bin:usr")]), "tool/bin/python", "activated");
    assert_eq!(found("tool", "tool/bin/elastic-agent", &[path]), "tool/bin/python", "called where it is");
    assert_eq!(found("plain", "elastic-agent", &[path]), "usr/python3", "no environment");
    assert_eq!(found("broken", "elastic-agent", &[path]), "usr/python3", "without an interpreter");

    std::fs::write(dir.path().join("tool/pyvenv.cfg"), "include-system-site-packages = true\n").unwrap();
    assert_eq!(found("tool", "links/tool/elastic-agent", &[path]), "tool/bin/python", "with the system's packages");
}

#[test]
fn scripts_modules_and_programs_get_their_arguments() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("python3"), 0o755);
    write(&dir.path().join("tool"), 0o755);
    let script = dir.path().join("t.py");
    write(&script, 0o644);
    let pairs = [("PATH", dir.path())];
    let args = |program: &Program| {
        let command = WorkerCommand::resolve(program, &env(&pairs), None).unwrap();
        let words: Vec<String> = command.args(1, 5).into_iter().map(|arg| arg.into_string().unwrap()).collect();
        (command.program.file_name().unwrap().to_str().unwrap().to_owned(), words)
    };
    let path = script.to_str().unwrap();

    assert_eq!(args(&program(ProgramKind::Script, path)).1, ["-u", path, "--x", "1/5"]);
    assert_eq!(args(&program(ProgramKind::Module, "pkg.train")).1, ["-u", "-m", "pkg.train", "--x", "1/5"]);
    assert_eq!(args(&program(ProgramKind::Executable, "tool")), ("tool".into(), vec!["--x".into(), "1/5".into()]));
}

#[test]
fn what_cannot_run_is_said_before_anything_is_joined() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(&at("bin/python3"), 0o755);
    write(&at("bin/plain"), 0o644);
    std::fs::create_dir(at("venv")).unwrap();
    let (bin, venv, absent) = (at("bin"), at("venv"), at("absent"));
    let error = |kind, name: OsString, pairs: &[(&str, &Path)]| {
        WorkerCommand::resolve(&program(kind, name), &env(pairs), None).unwrap_err().to_string()
    };
    let path = [("PATH", bin.as_path())];

    let table = [
        (error(ProgramKind::Script, at("no.py").into(), &path), "no.py\" does not exist; check the path"),
        (error(ProgramKind::Module, "m".into(), &[("PATH", &absent)]), "set PYTHON_EXEC or VIRTUAL_ENV"),
        (error(ProgramKind::Module, "m".into(), &[("PYTHON_EXEC", &venv)]), "which is a directory"),
        (error(ProgramKind::Executable, "nothing".into(), &path), "\"nothing\" is not on PATH"),
        (error(ProgramKind::Executable, "plain".into(), &path), "\"plain\" is not executable"),
        (error(ProgramKind::Executable, at("bin/plain").into(), &path), "is not executable"),
        (error(ProgramKind::Executable, at("gone").into(), &path), "does not exist"),
    ];
    for (error, expected) in table {
        assert!(error.contains(expected), "{error:?} should hold {expected:?}");
    }
}

#[test]
fn a_path_is_run_as_main_with_its_own_arguments() {
    let python = match Command::new("python3").arg("--version").output() {
        Ok(_) => "python3",
        Err(_) => return eprintln!("skipped: there is no python3"),
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.py");
    std::fs::write(&path, "import sys; print(__name__, sys.argv[1:], sys.argv[0] == __file__)").unwrap();
    let command =
        WorkerCommand::resolve(&program(ProgramKind::RunPath, path), &|name: &str| std::env::var_os(name), None)
            .unwrap();
    let output = Command::new(python).args(command.args(3, 7)).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "__main__ ['--x', '3/7'] True");
}

#[test]
fn a_script_that_differs_by_worker_is_left_to_python() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("python3"), 0o755);
    let script = program(ProgramKind::Script, "train_${local_rank}.py");
    let command = WorkerCommand::resolve(&script, &env(&[("PATH", dir.path())]), None).unwrap();
    assert_eq!(command.args(3, 7)[1], "train_3.py");
}

/// Arguments, and what they become for worker 3 with rank 7.
const MACROS: &[(&str, &str)] = &[
    ("${local_rank}", "3"),
    ("$local_rank", "3"),
    ("a${local_rank}b", "a3b"),
    ("$local_rank.log", "3.log"),
    ("$local_ranks", "$local_ranks"),
    ("${local_ranks}", "${local_ranks}"),
    ("$LOCAL_RANK", "$LOCAL_RANK"),
    ("$$local_rank", "$local_rank"),
    ("$$$local_rank", "$3"),
    ("$$", "$"),
    ("$", "$"),
    ("a$", "a$"),
    ("$5 $-x ${ } ${", "$5 $-x ${ } ${"),
    ("${local_rank", "${local_rank"),
    ("${local_rank }", "${local_rank }"),
    ("$local_rank$local_rank", "33"),
    ("é$local_rank", "é3"),
    ("$é", "$é"),
];

#[test]
fn macros_follow_pythons_templates() {
    for (arg, expected) in MACROS {
        assert_eq!(expand(OsStr::new(arg), 3, 7), OsString::from(expected), "{arg}");
    }
    assert_eq!(expand(OsStr::new("${rank}/$rank"), 3, 7), OsString::from("7/7"));
    let bytes = OsStr::from_bytes(b"\xff$local_rank\xfe");
    assert_eq!(expand(bytes, 3, 7).as_bytes(), b"\xff3\xfe");
}

#[test]
fn the_table_of_macros_is_what_python_does() {
    const SCRIPT: &str = "import string,sys\nfor a in sys.argv[1:]: \
                          print(string.Template(a).safe_substitute(local_rank=3))";
    let args = MACROS.iter().map(|(arg, _)| *arg);
    let run = Command::new("python3").env("PYTHONIOENCODING", "utf-8").arg("-c").arg(SCRIPT).args(args).output();
    let Ok(output) = run.inspect_err(|error| eprintln!("skipped: no python3: {error}")) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected: Vec<&str> = MACROS.iter().map(|(_, expected)| *expected).collect();
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().collect::<Vec<_>>(), expected);
}

proptest! {
    #[test]
    fn arguments_without_a_dollar_are_untouched(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        let bytes: Vec<u8> = bytes.into_iter().filter(|b| *b != b'$').collect();
        let out = expand(OsStr::from_bytes(&bytes), 3, 7);
        prop_assert_eq!(out.as_bytes(), &bytes[..]);
    }

    #[test]
    fn doubling_each_dollar_keeps_an_argument_as_it_is(text in "[$a-z_{}]{0,30}") {
        let out = expand(OsStr::new(&text.replace('$', "$$")), 3, 7);
        prop_assert_eq!(out, OsString::from(text));
    }
}
