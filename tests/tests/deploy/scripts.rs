//! The scripts of `deploy/etcd`, each by itself; `users.sh` has a page of its own.

use elastic_tests::prelude::*;

use crate::deploy::deploy;
use crate::deploy::machines::printed;

/// Runs a script of `deploy/etcd` in a folder. No user answers its questions.
pub(super) fn script(name: &str, folder: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
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
    let (done, said) = certificates.run(&["renew", "certs", "absent"], &[]);
    assert!(!done && said.contains("certs/absent.pem is missing"), "{said}");
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
fn settings_differ_in_the_members_own_lines_only() {
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

/// 3.6 renamed what begins with `--experimental-` and has no `--enable-v2`; 3.7 knows the new names only.
#[test]
fn every_release_knows_the_settings() {
    let here = tempfile::tempdir().unwrap();
    let made = script("settings.sh", here.path(), &["etcd0.example.org", "etcd0.example.org=10.0.0.10"], &[]);
    let made = printed(&made);
    let names = made.lines().filter_map(|line| Some(line.strip_prefix("ETCD_")?.split_once('=')?.0));
    let of_settings = names.map(|name| format!("--{}", name.to_lowercase().replace('_', "-")));
    let manifest = std::fs::read_to_string(deploy("kubernetes").join("etcd.yaml")).unwrap();
    let of_manifest = manifest.lines().filter_map(|line| line.trim().strip_prefix("- --"));
    let of_manifest = of_manifest.map(|flag| format!("--{}", flag.split('=').next().unwrap()));
    let flags: Vec<String> = of_settings.chain(of_manifest).collect();
    assert!(flags.len() > 25, "{flags:?}");
    for (release, options) in EtcdOptions::of(RELEASES) {
        let help = printed(&Command::new(options.binary.unwrap()).arg("--help").output().unwrap());
        for flag in &flags {
            let at = help.lines().find(|line| line.split_whitespace().next() == Some(flag.as_str()));
            assert!(at.is_some_and(|line| !line.to_lowercase().contains("deprecated")), "{release}: {flag}: {at:?}");
        }
    }
}
