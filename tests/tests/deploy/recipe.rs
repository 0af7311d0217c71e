//! `deploy/README.md` followed block by block on seven machines, to a job that trains on an etcd cluster with TLS and
//! users; and what the recipe says about users and certificates.

use elastic_agent::for_tests::FINAL_SAVE_LIMIT;
use elastic_tests::prelude::*;

use crate::deploy::blocks::{Block, blocks};
use crate::deploy::deploy;
use crate::deploy::machines::{Machine, Machines, printed};
use crate::deploy::units::Unit;

pub(super) const LIMIT: Duration = Duration::from_secs(60);

pub(super) const OPERATOR: &str = "operator.example.org";

const MACHINES: [(&str, &str); 7] = [
    (OPERATOR, "10.0.0.1"),
    ("etcd0.example.org", "10.0.0.10"),
    ("etcd1.example.org", "10.0.0.11"),
    ("etcd2.example.org", "10.0.0.12"),
    ("node0.example.org", "10.0.0.20"),
    ("node1.example.org", "10.0.0.21"),
    ("coordinator0.example.org", "10.0.0.30"),
];

struct Service {
    machine: String,
    unit: String,
    process: Process,
}

/// The machines, what runs on them, and the document that is followed.
pub(super) struct Site {
    // Services end before the machines that they run on.
    services: Vec<Service>,
    pub(super) machines: Machines,
}

impl Drop for Site {
    fn drop(&mut self) {
        for service in &mut self.services {
            service.process.kill();
            if std::thread::panicking() {
                let log = self.machines.named(&service.machine).path(&log(&service.unit));
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let lines: Vec<_> = text.lines().collect();
                let tail = lines[lines.len().saturating_sub(25)..].join("\n");
                eprintln!("--- {} on {}\n{tail}", service.unit, service.machine);
            }
        }
    }
}

fn log(unit: &str) -> String {
    format!("/run/{unit}.log")
}

impl Site {
    pub(super) fn new() -> Option<Site> {
        let machines = Machines::new(&MACHINES)?;
        // Everyone sees the folder that represents NFS.
        std::fs::create_dir(machines.shared()).unwrap();
        for node in ["node0.example.org", "node1.example.org"] {
            machines.named(node).mount(&machines.shared(), "/srv/train/shared");
        }
        let operator = machines.named(OPERATOR);
        operator.run("mkdir -p /srv/elastic/target/release");
        let programs = ["elastic-agent", "elastic-trainer", "elastic-coordinator", "elasticctl"];
        for program in programs.map(binary) {
            operator.run(&format!("ln -s {} /srv/elastic/target/release/", program.display()));
        }
        operator.run(&format!("ln -s {} /usr/local/bin/", binary("elasticctl").display()));
        operator.run(&format!("cp -r {} /srv/elastic/", deploy("").canonicalize().unwrap().display()));
        Some(Site { services: Vec::new(), machines })
    }

    /// Runs a script on the operator's machine, in the folder of the recipe: whether it succeeded, and what it printed.
    fn operator(&self, script: &str) -> (bool, String) {
        let output = self.machines.named(OPERATOR).output("/srv/elastic/deploy", &format!(". ./cluster.sh\n{script}"));
        (output.status.success(), printed(&output))
    }

    pub(super) fn operator_ok(&self, script: &str) -> String {
        let (done, text) = self.operator(script);
        assert!(done, "{script}\n{text}");
        text
    }

    /// Runs a block where it says, on all machines at once if there are several, and then does what systemctl was asked
    /// for. Returns what it printed.
    pub(super) async fn follow(&mut self, block: &Block) -> String {
        let (places, folder) = match block.place.split(',').next().unwrap() {
            "On the operator's machine" => ("operator", "/srv/elastic/deploy"),
            "On each etcd member" => ("etcd", "/root"),
            "On each node" => ("node", "/root"),
            "On each coordinator's machine" => ("coordinator", "/root"),
            other => panic!("this place is unknown: {other}"),
        };
        let machines: Vec<&Machine> = self.machines.all.iter().filter(|m| m.name.starts_with(places)).collect();
        let outputs = std::thread::scope(|scope| {
            let running: Vec<_> =
                machines.iter().map(|machine| scope.spawn(|| machine.output(folder, &block.script))).collect();
            running.into_iter().map(|running| running.join().unwrap()).collect::<Vec<_>>()
        });
        let mut text = String::new();
        for (machine, output) in machines.iter().zip(outputs) {
            text += &printed(&output);
            assert!(output.status.success(), "on {}:\n{}\n{}", machine.name, block.script, printed(&output));
        }
        self.do_what_was_asked().await;
        text
    }

    /// Starts, stops and restarts units as systemctl was asked to, and waits until they are up.
    pub(super) async fn do_what_was_asked(&mut self) {
        let asked: Vec<(String, String)> = self
            .machines
            .all
            .iter()
            .flat_map(|machine| machine.asked().into_iter().map(|line| (machine.name.clone(), line)))
            .collect();
        let mut begun = Vec::new();
        for (machine, line) in asked {
            let (flags, words): (Vec<&str>, Vec<&str>) =
                line.split_whitespace().partition(|word| word.starts_with('-'));
            match (words[..].split_first(), flags.contains(&"--now")) {
                (Some((&"daemon-reload", [])), _) | (Some((&"enable", [_])), false) => {}
                (Some((&"start", [unit])), _) | (Some((&"enable", [unit])), true) => {
                    begun.push(self.start(&machine, unit))
                }
                (Some((&"stop", [unit])), _) => self.stop(&machine, unit).await,
                (Some((&"restart", [unit])), _) => {
                    self.stop(&machine, unit).await;
                    begun.push(self.start(&machine, unit));
                }
                _ => panic!("systemctl {line}: not supported here"),
            }
        }
        for (machine, unit) in begun {
            self.is_up(&machine, &unit).await;
        }
    }

    fn start(&mut self, machine: &str, unit: &str) -> (String, String) {
        let on = self.machines.named(machine);
        let launch = Unit::read(on, unit).launch(on);
        let process = Process::spawn(&format!("{unit} on {machine}"), on.command(&launch), &on.path(&log(unit)));
        self.services.push(Service { machine: machine.to_owned(), unit: unit.to_owned(), process });
        (machine.to_owned(), unit.to_owned())
    }

    async fn stop(&mut self, machine: &str, unit: &str) {
        let running = self.services.iter().position(|service| service.machine == machine && service.unit == unit);
        let Some(running) = running else { return };
        let mut service = self.services.remove(running);
        service.process.terminate(Unit::read(self.machines.named(machine), unit).stop_timeout()).await;
    }

    /// As systemd, which waits for etcd's word; agents are waited for until their workers run.
    async fn is_up(&mut self, machine: &str, unit: &str) {
        let mark = match unit.split('@').next().unwrap() {
            "etcd" => "ready to serve client requests",
            "elastic-train-agent" => "running:",
            "elastic-train-coordinator" => "watching",
            other => panic!("{other} is no unit of the recipe"),
        };
        let service = self.services.iter_mut().find(|s| s.machine == machine && s.unit == unit).unwrap();
        let mut is_up = || {
            let said = service.process.output().contains(mark);
            let ended = service.process.ended();
            assert!(said || ended.is_none(), "{unit} on {machine} ended: {ended:?}");
            said.then_some(())
        };
        eventually(&format!("{unit} on {machine} is up"), LIMIT, || std::future::ready(is_up())).await;
    }

    /// The exit codes of a job's agents, on both nodes.
    pub(super) async fn ends(&mut self, unit: &str) -> Vec<i32> {
        let mut codes = Vec::new();
        for service in self.services.iter_mut().filter(|service| service.unit == unit) {
            codes.push(service.process.exit(LIMIT).await);
        }
        codes
    }

    /// The serial number of the certificate that a member serves.
    fn served(&self, host: &str) -> String {
        self.operator_ok(&format!(
            "openssl s_client -connect {host}:2379 -CAfile certs/ca.pem -cert certs/operator.pem \
             -key certs/operator-key.pem < /dev/null 2> /dev/null | openssl x509 -noout -serial"
        ))
    }

    pub(super) fn describe(&self, job: &str) -> serde_json::Value {
        serde_json::from_str(&self.operator_ok(&format!("elasticctl describe {job} -o json"))).unwrap()
    }
}

#[tokio::test]
async fn the_recipe_leads_to_a_job_that_trains() {
    let Some(mut site) = Site::new() else { return };
    let recipe = std::fs::read_to_string(deploy("README.md")).unwrap();
    let (mut shown, mut scripted, mut renewed, mut restored) = (false, false, false, false);
    let all = blocks(&recipe);
    let renewal = all.iter().find(|block| block.script.contains("certificates.sh renew")).expect("a renewal");
    for block in
        all.iter().filter(|block| !block.place.starts_with("Not in the test") && !std::ptr::eq(*block, renewal))
    {
        let printed = site.follow(block).await;
        if block.script.contains("elasticctl describe digits") {
            shown = true;
            assert!(printed.contains("node0.example.org") && printed.contains("node1.example.org"), "{printed}");
            while_the_job_trains(&mut site, renewal).await;
            renewed = true;
            assert_eq!(site.ends("elastic-train-agent@digits").await, [0, 0]);
            assert_eq!(site.describe("digits")["round"]["state"], "succeeded");
        }
        if block.script.contains("> train.env") {
            a_script_runs_in_its_environment(&mut site).await;
            scripted = true;
        }
        if block.script.contains("snapshot save") {
            site.operator_ok("elasticctl delete train");
        }
        if block.script.contains("snapshot restore") {
            let known = async || site.operator("elasticctl describe train").0.then_some(());
            eventually("etcd knows what was deleted after the backup", LIMIT, known).await;
            assert_eq!(site.describe("train")["round"]["state"], "succeeded");
            restored = true;
        }
    }
    assert!(shown && renewed && scripted && restored, "the recipe has lost a step that this test waits for");
    units_are_sound(&site);
}

/// Everything here happens during one round of the job.
async fn while_the_job_trains(site: &mut Site, renewal: &Block) {
    // Given a job that the coordinator leads
    let leads = "the coordinator leads";
    eventually(leads, LIMIT, async || (site.describe("digits")["leader"]["coordinator"] == true).then_some(())).await;
    let before = site.describe("digits");
    assert_eq!(before["round"]["state"], "running");
    assert!(site.operator_ok("elasticctl jobs").contains("digits"));
    let metrics = site.operator_ok("curl --silent --show-error http://coordinator0.example.org:9400/metrics");
    assert!(metrics.contains(r#"elastic_job_world_size{job="digits"} 2"#), "{metrics}");

    // The reader sees, and asks for nothing
    let reader = "export ELASTIC_ETCD_CERT=certs/reader.pem ELASTIC_ETCD_KEY=certs/reader-key.pem \
                  ELASTIC_ETCD_USER=elastic-reader ELASTIC_ETCD_PASSWORD_FILE=passwords/elastic-reader\n";
    assert!(site.operator_ok(&format!("{reader} elasticctl jobs")).contains("digits"));
    let (done, said) = site.operator(&format!("{reader} elasticctl drain digits node1.example.org"));
    assert!(!done && said.contains("permission denied"), "{said}");

    // A certificate alone opens no key, and a password without one no connection
    let (done, said) = site.operator("unset ELASTIC_ETCD_USER ELASTIC_ETCD_PASSWORD_FILE\n elasticctl jobs");
    assert!(!done, "{said}");
    let (done, said) = site.operator("unset ELASTIC_ETCD_CERT ELASTIC_ETCD_KEY\n elasticctl jobs");
    assert!(!done, "{said}");

    // Users can be made again, which changes nothing
    let said = site.operator_ok("etcd/users.sh --passwords passwords");
    assert!(said.contains("user elastic-agents is there already"), "{said}");

    // One member's settings are not another's
    let (done, said) = site.operator(
        "scp etcd0.example.org.env root@etcd1.example.org:/root/copied\n\
         ssh root@etcd1.example.org elastic-etcd-settings --check /root/copied",
    );
    assert!(!done && said.contains("10.0.0.10 is no address of this machine"), "{said}");
    assert!(said.contains("server.pem is another host's: it is for etcd1.example.org"), "{said}");

    // When a member's certificate is renewed and it is restarted
    let serial = site.served("etcd1.example.org");
    site.follow(renewal).await;
    assert_ne!(site.served("etcd1.example.org"), serial);

    // Then the job has gone on in the same round
    let after = site.describe("digits");
    assert_eq!(after["round"]["state"], "running", "the job must not be over yet: give it more epochs");
    assert_eq!(after["round"]["number"], before["round"]["number"]);
}

/// The job of a Python script: it notes which Python runs it.
async fn a_script_runs_in_its_environment(site: &mut Site) {
    let script = "import os, sys\nprint('runs in', sys.prefix, 'as', os.getuid())\n";
    for node in ["node0.example.org", "node1.example.org"] {
        let machine = site.machines.named(node);
        std::fs::write(machine.path("/srv/train/train.py"), script).unwrap();
        machine.run("chmod 644 /srv/train/train.py && systemctl start elastic-train-agent@train");
    }
    site.do_what_was_asked().await;
    assert_eq!(site.ends("elastic-train-agent@train").await, [0, 0]);
    let node = site.machines.named("node0.example.org");
    let elastic = node.run("id -u elastic");
    let said = std::fs::read_to_string(node.path(&log("elastic-train-agent@train"))).unwrap();
    assert!(said.contains(&format!("runs in /srv/train/venv as {}", elastic.trim())), "{said}");
}

/// systemd's own check, where it is installed; and what a unit must leave an agent time for.
fn units_are_sound(site: &Site) {
    let agent = Unit::read(site.machines.named("node0.example.org"), "elastic-train-agent@digits");
    let least = Duration::from_secs(30) + FINAL_SAVE_LIMIT;
    assert!(agent.stop_timeout() >= least, "{:?} is less than stopping and saving may take", agent.stop_timeout());

    if !Path::new("/usr/bin/systemd-analyze").exists() {
        return skip("SYSTEMD", "systemd-analyze is not installed (Debian's package systemd): units are not verified");
    }
    for (machine, unit, instance) in [
        ("node0.example.org", "elastic-train-agent@.service", "elastic-train-agent@digits.service"),
        ("coordinator0.example.org", "elastic-train-coordinator.service", "elastic-train-coordinator.service"),
    ] {
        let verify = format!(
            "mkdir -p units && cp /etc/systemd/system/{unit} units/{instance} && systemd-analyze verify units/{instance}"
        );
        let said = site.machines.named(machine).run(&verify);
        let ours: Vec<_> = said.lines().filter(|line| line.contains("elastic")).collect();
        assert!(ours.is_empty(), "{ours:?}");
    }
}
