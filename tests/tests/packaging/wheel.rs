//! The wheels in fresh virtual environments, without a network.

use elastic_tests::prelude::*;
use std::env::consts::ARCH;

use super::place::Place;
use super::{made, root, succeeds};

/// A virtual environment of its own, as a service uses it: nothing has activated it.
struct Environment {
    dir: tempfile::TempDir,
    place: Place,
}

impl Environment {
    /// With this installed from `dist/` alone. `None` where there are no wheels.
    fn with(what: &str) -> Option<Environment> {
        if made("DIST", "elastic_agent-", &format!("_{ARCH}.whl")).is_empty() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = format!("{}:/usr/bin:/bin", dir.path().join("venv/bin").display());
        let environment = Environment { place: Place::folder(&path), dir };
        succeeds(Command::new("python3").args(["-m", "venv"]).arg(environment.dir.path().join("venv")));
        let pip = ["-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", "--find-links"];
        succeeds(environment.python(&pip).arg(root().join("dist")).arg(what));
        environment.place.tell(&format!("pip install {what} is done"));
        Some(environment)
    }

    fn bin(&self) -> PathBuf {
        self.dir.path().join("venv/bin")
    }

    fn python(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(self.bin().join("python").to_str().unwrap());
        command.args(arguments).current_dir(self.dir.path());
        command
    }

    fn script(&self, text: &str) -> String {
        let path = self.dir.path().join("train.py");
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    fn site_packages(&self) -> PathBuf {
        let found = succeeds(&mut self.python(&["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]));
        PathBuf::from(found.trim())
    }
}

#[tokio::test]
#[ignore = "needs dist/: make test-dist"]
async fn a_job_trains_from_a_fresh_environment() {
    let Some(environment) = Environment::with("elastic-agent") else { return };
    environment.place.trains_alone("the wheel").await;
    let share = environment.dir.path().join("venv/share");
    assert!(share.join("man/man1/elasticctl.1").is_file());
    assert!(share.join("doc/elastic/THIRD-PARTY-LICENCES").is_file());
    for program in ["elastic-coordinator", "elasticctl"] {
        let version =
            succeeds(environment.place.command(environment.bin().join(program).to_str().unwrap()).arg("--version"));
        assert_eq!(version, format!("{program} {}\n", env!("CARGO_PKG_VERSION")));
    }
}

#[test]
#[ignore = "needs dist/: make test-dist"]
fn other_launchers_names_run_the_agent() {
    let Some(environment) = Environment::with("elastic-agent[compat]") else { return };
    let script = environment.script(
        "import os, sys\nplace = os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE']\n\
         sys.stdout.write(f'{sys.executable} {place} {sys.argv[1:]}\\n')\n",
    );
    let torchrun = environment.bin().join("torchrun").display().to_string();
    let python = environment.bin().join("python").display().to_string();
    let launchers: [(&[&str], &str); 3] = [
        (&[&torchrun], "With torchrun's defaults"),
        (&[&python, "-m", "bagua.distributed.run"], "With torchrun's defaults"),
        (&[&python, "-m", "torchelastic.distributed.launch"], "torchelastic.distributed.launch 0.2.2"),
    ];
    for (words, defaults) in launchers {
        let run = |arguments: &[&str]| {
            let mut command = environment.place.command(words[0]);
            succeeds(command.args(&words[1..]).args(arguments).current_dir(environment.dir.path()))
        };
        assert!(run(&["--help"]).contains(defaults), "{words:?}");
        let said = run(&["--standalone", "--nproc_per_node=2", &script, "--lr", "1"]);
        for rank in 0..2 {
            // The very Python that started it runs the workers.
            let worker = format!("{python} ('{rank}', '2') ['--lr', '1']\n");
            assert!(said.contains(&worker), "{words:?}: {said}");
        }
    }
}

#[test]
#[ignore = "needs dist/: make test-dist"]
fn a_real_package_goes_before_our_name_for_it() {
    let Some(environment) = Environment::with("elastic-agent[compat]") else { return };
    let real = |package: &str, file: &str| {
        let folder = environment.site_packages().join(package);
        std::fs::create_dir_all(folder.join("distributed")).unwrap();
        std::fs::write(folder.join("__init__.py"), "").unwrap();
        std::fs::write(folder.join("distributed/__init__.py"), "").unwrap();
        std::fs::write(folder.join("distributed").join(file), "print('the real one')").unwrap();
    };
    for (package, name) in [("bagua", "run"), ("torchelastic", "launch")] {
        let module = format!("{package}.distributed.{name}");
        let module = module.as_str();
        let version = succeeds(&mut environment.python(&["-m", module, "--version"]));
        assert!(version.starts_with("elastic-agent "), "{module}: {version}");
        real(package, &format!("{name}.py"));
        assert_eq!(succeeds(&mut environment.python(&["-m", module, "--version"])), "the real one\n");
    }
}
