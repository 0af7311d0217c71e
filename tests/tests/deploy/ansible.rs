//! `deploy/ansible/` run on the machines of the recipe, whose names it has too. apt's tasks are left out: the machines
//! share this one's packages. Of systemd there is the stand-in that notes what it is asked for, and units are started by
//! the test.

use elastic_tests::prelude::*;

use super::blocks::blocks;
use super::deploy;
use super::machines::printed;
use super::recipe::{LIMIT, OPERATOR, Site};

fn is_installed(program: &str, package: &str) -> bool {
    let is = Command::new(program).arg("--version").output().is_ok();
    if !is {
        skip("ANSIBLE", format_args!("{program} is not installed (Debian's package {package})"));
    }
    is
}

#[test]
#[ignore = "needs ansible-lint: make chaos"]
fn the_playbook_is_as_ansibles_own_lint_wants_it() {
    if !is_installed("ansible-lint", "ansible-lint") {
        return;
    }
    let lint = "ansible-lint --nocolor --offline --profile production site.yml";
    let output = Command::new("sh").args(["-c", lint]).current_dir(deploy("ansible")).output().unwrap();
    assert!(output.status.success(), "{}", printed(&output));
}

/// Runs the playbook with these flags; what it printed.
fn play(site: &Site, flags: &str) -> String {
    // The stand-in for ssh copies no files by itself.
    let script = format!(
        "cd /srv/elastic/deploy/ansible && ANSIBLE_SSH_TRANSFER_METHOD=piped ANSIBLE_PIPELINING=1 ANSIBLE_FORKS=2 \
         timeout 240 ansible-playbook --inventory inventory.ini site.yml {flags}"
    );
    let output = site.machines.named(OPERATOR).command(&["sh", "-c", &script]).output().expect("nsenter");
    assert!(output.status.success(), "{flags}\n{}", printed(&output));
    printed(&output)
}

#[tokio::test]
#[ignore = "two minutes, and needs ansible-playbook: make chaos"]
async fn the_playbook_leads_to_a_job_that_trains() {
    if !is_installed("ansible-playbook", "ansible-core") {
        return;
    }
    let Some(mut site) = Site::new() else { return };
    let names = &blocks(&std::fs::read_to_string(deploy("README.md")).unwrap())[0];
    site.follow(names).await;
    site.operator_ok("ln -s ansible/secrets/certs ansible/secrets/passwords .");
    // What the packages would have brought.
    for (machines, programs, unit) in [
        (&["node0", "node1"][..], "elastic-agent elastic-trainer", "elastic-train-agent@.service"),
        (&["coordinator0"][..], "elastic-coordinator elasticctl", "elastic-train-coordinator.service"),
    ] {
        for name in machines {
            let host = format!("{name}.example.org");
            site.operator_ok(&format!(
                "cd ../target/release && scp {programs} root@{host}:/usr/local/bin/\n\
                 cd ../../deploy/systemd && scp {unit} root@{host}:/etc/systemd/system/"
            ));
            let machine = site.machines.named(&host);
            machine.run("chmod 755 /usr/local/bin/elastic*; install -d /etc/elastic");
            machine.run("useradd --system --home-dir /srv/train --shell /usr/sbin/nologin elastic");
            machine.run("install -d -o elastic -g elastic /srv/train /srv/train/shared");
        }
    }

    // Given etcd as the playbook makes it, and then the rest
    play(&site, "--limit localhost,etcd --skip-tags packages,users");
    site.do_what_was_asked().await;
    let said = play(&site, "--skip-tags packages");
    assert!(said.contains("changed: [localhost]"), "{said}");
    for node in ["node0", "node1"] {
        site.machines.named(&format!("{node}.example.org")).run("systemctl start elastic-train-agent@digits");
    }
    site.do_what_was_asked().await;

    // Then the job trains, led by the coordinator
    let leads = async || (site.describe("digits")["leader"]["coordinator"] == true).then_some(());
    eventually("the coordinator leads", LIMIT, leads).await;
    assert_eq!(site.describe("digits")["round"]["world_size"], 2);

    // And where nothing differs, nothing is changed
    let said = play(&site, "--skip-tags packages");
    assert!(!said.contains("changed: ["), "{said}");
    assert_eq!(site.ends("elastic-train-agent@digits").await, [0, 0]);
}
