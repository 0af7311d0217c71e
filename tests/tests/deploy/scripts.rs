//! The scripts of `deploy/etcd`, each by itself.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use elastic_tests::agents::{Job, LIMIT};
use elastic_tests::etcd::{EtcdOptions, EtcdServer};
use tempfile::TempDir;

use crate::deploy::deploy;
use crate::deploy::machines::printed;

/// Runs a script of `deploy/etcd` in a folder. Nobody is there to answer its questions.
fn script(name: &str, folder: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(deploy("etcd").join(name));
    command.args(args).current_dir(folder).envs(env.iter().copied()).stdin(Stdio::null());
    command.output().expect("run a script")
}

struct Certificates(TempDir);

impl Certificates {
    fn new() -> Certificates {
        let certificates = Certificates(tempfile::tempdir().unwrap());
        certificates.ok(&["new", "certs"], &[]);
        certificates
    }

    fn run(&self, args: &[&str], env: &[(&str, &str)]) -> (bool, String) {
        let output = script("certificates.sh", self.0.path(), args, env);
        (output.status.success(), printed(&output))
    }

    fn ok(&self, args: &[&str], env: &[(&str, &str)]) -> String {
        let (done, text) = self.run(args, env);
        assert!(done, "{args:?}: {text}");
        text
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.0.path().join("certs").join(file)).unwrap()
    }

    /// What openssl says of a certificate.
    fn openssl(&self, args: &[&str]) -> String {
        let output = Command::new("openssl").args(args).current_dir(self.0.path().join("certs")).output().unwrap();
        printed(&output)
    }

    fn names(&self, file: &str) -> String {
        self.openssl(&["x509", "-in", file, "-noout", "-subject", "-ext", "subjectAltName,extendedKeyUsage"])
    }

    /// Whether a certificate is good for this purpose.
    fn good_for(&self, purpose: &str, file: &str) -> bool {
        self.openssl(&["verify", "-CAfile", "ca.pem", "-purpose", purpose, file]).contains(": OK")
    }
}

#[test]
fn certificates_are_made_for_members_and_clients_and_for_members_that_come_later() {
    let certificates = Certificates::new();
    certificates.ok(&["member", "certs", "etcd0.example.org"], &[]);
    certificates.ok(&["client", "certs", "agents", "operator"], &[]);
    certificates.ok(&["member", "certs", "etcd1.example.org"], &[]);

    for member in ["etcd0.example.org.pem", "etcd1.example.org.pem"] {
        assert!(certificates.good_for("sslserver", member) && certificates.good_for("sslclient", member));
    }
    assert!(certificates.good_for("sslclient", "agents.pem"));
    assert!(!certificates.good_for("sslserver", "agents.pem"), "an agent must not pass for a member");
    // etcd compares other names with a client's address, and takes the common name for a user's.
    let names = certificates.names("agents.pem");
    assert!(names.contains("CN = client agents") && !names.contains("DNS:"), "{names}");
    for key in ["ca-key.pem", "agents-key.pem", "etcd0.example.org-key.pem"] {
        let mode = certificates.0.path().join("certs").join(key).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{key} can be read by others");
    }
    let mut left: Vec<_> = std::fs::read_dir(certificates.0.path().join("certs")).unwrap().flatten().collect();
    left.retain(|entry| entry.path().extension().is_none_or(|extension| extension != "pem"));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_is_there_is_not_made_again() {
    let certificates = Certificates::new();
    certificates.ok(&["client", "certs", "agents"], &[]);
    let (ca, agents) = (certificates.read("ca-key.pem"), certificates.read("agents.pem"));
    for again in [&["new", "certs"][..], &["client", "certs", "operator", "agents"], &["client", "certs", "ca"]] {
        let (done, _) = certificates.run(again, &[]);
        assert!(!done, "{again:?}");
    }
    assert_eq!((certificates.read("ca-key.pem"), certificates.read("agents.pem")), (ca, agents));
    let (done, said) = certificates.run(&["renew", "certs", "nobody"], &[]);
    assert!(!done && said.contains("certs/nobody.pem is missing"), "{said}");
}

#[test]
fn certificates_are_renewed_with_their_names_and_keys() {
    let certificates = Certificates::new();
    let short = [("ELASTIC_CERTIFICATE_DAYS", "20")];
    certificates.ok(&["member", "certs", "etcd0.example.org"], &short);
    certificates.ok(&["client", "certs", "agents"], &short);

    // Given two that end soon
    let (good, said) = certificates.run(&["expiry", "certs"], &[]);
    assert!(!good && said.matches("within 30 days").count() == 2, "{said}");
    let (good, _) = certificates.run(&["expiry", "certs", "10"], &[]);
    assert!(good);

    // When one is renewed
    let (key, names) = (certificates.read("agents-key.pem"), certificates.names("agents.pem"));
    let old = certificates.read("agents.pem");
    certificates.ok(&["renew", "certs", "agents"], &[]);

    // Then it is another certificate for the same
    assert_ne!(certificates.read("agents.pem"), old);
    assert_eq!((certificates.read("agents-key.pem"), certificates.names("agents.pem")), (key, names));
    let (good, said) = certificates.run(&["expiry", "certs"], &[]);
    assert!(!good && said.contains("etcd0.example.org.pem") && said.matches("within 30 days").count() == 1, "{said}");

    // And all of them
    let names = certificates.names("etcd0.example.org.pem");
    certificates.ok(&["renew", "certs", "--all"], &[]);
    certificates.ok(&["expiry", "certs"], &[]);
    assert_eq!(certificates.names("etcd0.example.org.pem"), names);
    assert!(certificates.good_for("sslserver", "etcd0.example.org.pem"));
}

#[test]
fn settings_differ_in_the_members_own_lines_alone() {
    let here = tempfile::tempdir().unwrap();
    let members = ["etcd0.example.org=10.0.0.10", "etcd1.example.org=fd00::11"];
    let of = |args: &[&str]| {
        let output = script("settings.sh", here.path(), &[args, &members].concat(), &[]);
        (output.status.success(), printed(&output))
    };
    let ((_, first), (_, second)) = (of(&["etcd0.example.org"]), of(&["etcd1.example.org"]));
    let differs = first.lines().zip(second.lines()).filter(|(a, b)| a != b);
    let names: Vec<&str> = differs.map(|(line, _)| line.split('=').next().unwrap()).collect();
    let own =
        ["NAME", "LISTEN_PEER_URLS", "LISTEN_CLIENT_URLS", "INITIAL_ADVERTISE_PEER_URLS", "ADVERTISE_CLIENT_URLS"];
    assert_eq!(names[1..], own.map(|name| format!("ETCD_{name}")));
    assert!(second.contains("ETCD_LISTEN_PEER_URLS=https://[fd00::11]:2380\n"), "{second}");
    assert!(first.contains("ETCD_INITIAL_CLUSTER_STATE=new\n"));
    assert!(of(&["--existing", "etcd0.example.org"]).1.contains("ETCD_INITIAL_CLUSTER_STATE=existing\n"));
    let (done, said) = of(&["etcd9.example.org"]);
    assert!(!done && said.contains("etcd9.example.org is not among the members"), "{said}");
}

/// An etcd, a folder of passwords, and an etcdctl that notes how it is called.
struct Users {
    etcd: EtcdServer,
    dir: TempDir,
}

const USERS: [&str; 5] = ["root", "elastic-reader", "elastic-operator", "elastic-agents", "elastic-agents-job"];

impl Users {
    async fn new() -> Users {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let users = Users { etcd, dir: tempfile::tempdir().unwrap() };
        let dir = users.dir.path();
        std::fs::create_dir(dir.join("passwords")).unwrap();
        for user in USERS {
            std::fs::write(dir.join("passwords").join(user), format!("secret-{user}\n")).unwrap();
        }
        let real = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|folder| folder.join("etcdctl"))
            .find(|path| path.is_file())
            .expect("etcdctl: install etcd-client");
        let noting = format!("#!/bin/sh\necho \"$*\" >> {}/calls\nexec {} \"$@\"\n", dir.display(), real.display());
        std::fs::create_dir(dir.join("bin")).unwrap();
        std::fs::write(dir.join("bin/etcdctl"), noting).unwrap();
        std::fs::set_permissions(dir.join("bin/etcdctl"), std::fs::Permissions::from_mode(0o755)).unwrap();
        users
    }

    fn run(&self, args: &[&str]) -> (bool, String) {
        let path = format!("{}/bin:{}", self.dir.path().display(), std::env::var("PATH").unwrap());
        let env = [("ETCDCTL_ENDPOINTS", &*self.etcd.address()), ("PATH", &path)];
        let output = script("users.sh", self.dir.path(), args, &env);
        (output.status.success(), printed(&output))
    }

    fn ok(&self, args: &[&str]) -> String {
        let (done, text) = self.run(args);
        assert!(done, "{args:?}: {text}");
        text
    }

    /// Whether etcd does this for a user with this password.
    fn may(&self, user: &str, password: &str, args: &[&str]) -> bool {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").env("ETCDCTL_USER", format!("{user}:{password}"));
        command.args(["--endpoints", &self.etcd.address()]).args(args);
        command.output().expect("etcdctl").status.success()
    }

    /// The same with the password that was made for the user.
    fn does(&self, user: &str, args: &[&str]) -> bool {
        self.may(user, &format!("secret-{user}"), args)
    }
}

#[tokio::test]
async fn each_user_may_do_its_part_and_no_more() {
    let users = Users::new().await;
    users.ok(&["--passwords", "passwords"]);
    users.ok(&["--passwords", "passwords", "job", "job"]);
    let (own, other) = ("/elastic/v1/jobs/job/round", "/elastic/v1/jobs/job2/round");

    for (user, reads, writes, writes_others) in [
        ("elastic-reader", true, false, false),
        ("elastic-operator", true, true, true),
        ("elastic-agents", true, true, true),
        ("elastic-agents-job", true, true, false),
    ] {
        assert_eq!(users.does(user, &["put", own, "x"]), writes, "{user} writes");
        assert_eq!(users.does(user, &["put", other, "x"]), writes_others, "{user} writes another's job");
        assert_eq!(users.does(user, &["get", own]), reads, "{user} reads");
        assert!(!users.does(user, &["get", "/else"]) && !users.does(user, &["put", "/else", "x"]), "{user} elsewhere");
        assert!(!users.does(user, &["user", "list"]), "{user} manages users");
    }
    assert!(users.does("root", &["del", "--prefix", "/elastic/"]));

    // The agents of a job need nothing but its keys
    let password = users.dir.path().join("passwords/elastic-agents-job");
    let job = Job::on(&users.etcd, "1").conf("user", "elastic-agents-job");
    let job = job.conf("password_file", password.to_str().unwrap()).program(["true"]);
    assert_eq!(job.start("a").exit(LIMIT).await, 0);
}

#[tokio::test]
async fn users_are_made_once_and_passwords_are_no_arguments() {
    let users = Users::new().await;
    users.ok(&["--passwords", "passwords"]);

    // Given users who are there, with files that hold other passwords by now
    std::fs::write(users.dir.path().join("passwords/elastic-reader"), "another\n").unwrap();
    let said = users.ok(&["--passwords", "passwords"]);
    assert!(said.contains("user elastic-reader is there already: its password stays"), "{said}");
    assert!(users.does("elastic-reader", &["get", "/elastic/x"]));

    // When a password is to change, it does
    users.ok(&["--passwords", "passwords", "password", "elastic-reader"]);
    assert!(users.may("elastic-reader", "another", &["get", "/elastic/x"]));
    assert!(!users.does("elastic-reader", &["get", "/elastic/x"]));

    // Then no command line had one
    let calls = std::fs::read_to_string(users.dir.path().join("calls")).unwrap();
    assert!(calls.contains("user add elastic-reader") && calls.contains("user passwd elastic-reader"), "{calls}");
    assert!(!calls.contains("secret") && !calls.contains("another"), "{calls}");

    // And what cannot be done is said
    std::fs::remove_file(users.dir.path().join("passwords/root")).unwrap();
    let (done, said) = users.run(&["--passwords", "passwords"]);
    assert!(!done && said.contains("passwords/root is missing"), "{said}");
    let (done, said) = users.run(&[]);
    assert!(!done && said.contains("on a terminal only"), "{said}");
}
