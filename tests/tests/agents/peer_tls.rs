//! Mutual TLS among agents and coordinators, with certificates that `elasticctl certs` makes.

use elastic_tests::prelude::*;

use super::hosted::endpoint;

pub(crate) struct Pki(TempDir);

impl Pki {
    /// A fresh authority, and a certificate for each of these.
    pub(crate) async fn of(names: &[&str]) -> Pki {
        let pki = Pki(tempfile::tempdir().unwrap());
        pki.makes(&["authority"], &[]).await;
        if !names.is_empty() {
            pki.makes(&["node"], names).await;
        }
        pki
    }

    async fn certs(&self, what: &[&str], rest: &[&str]) -> Output {
        let folder = self.0.path().to_str().unwrap();
        output("elasticctl", &[&["certs"], what, &[folder], rest].concat(), LIMIT).await
    }

    async fn makes(&self, what: &[&str], rest: &[&str]) {
        let made = self.certs(what, rest).await;
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    pub(crate) fn flags(&self, name: &str) -> [String; 3] {
        let flag = |flag: &str, file: String| format!("--peer-{flag}={}", self.path(&file).display());
        [flag("cert", format!("{name}.pem")), flag("key", format!("{name}-key.pem")), flag("ca", "ca.pem".into())]
    }
}

fn words(flags: &[String; 3]) -> [&str; 3] {
    flags.each_ref().map(String::as_str)
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What `/metrics` says on when the certificate ends.
async fn certificate_end(pki: &Pki, at: &str, name: &str) -> Option<u64> {
    let text = String::from_utf8(curl(pki, true, &format!("{at}/metrics")).await.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

async fn ask_health(pki: &Pki, port: u16, certificate: bool) -> bool {
    curl(pki, certificate, &format!("https://127.0.0.1:{port}/live")).await.status.success()
}

/// What a client sees there that trusts the authority, and shows a certificate or none.
async fn curl(pki: &Pki, certificate: bool, at: &str) -> Output {
    let file = |name: &str| pki.path(name).display().to_string();
    let mut curl = tokio::process::Command::new("curl");
    curl.args(["--silent", "--fail", "--max-time", "5", "--cacert", &file("ca.pem")]);
    if certificate {
        curl.args(["--cert", &file("a.pem"), "--key", &file("a-key.pem")]);
    }
    curl.arg(at).output().await.unwrap()
}

#[tokio::test]
async fn a_job_and_its_coordinator_speak_tls_and_who_does_not_fit_is_kept_out() {
    let (pki, others) = (Pki::of(&["a,127.0.0.1", "b", "coordinator", "anna"]).await, Pki::of(&["d"]).await);
    let job = Job::on_etcd("2:3").await.flag("--max-restarts=3").prompt();
    let address = job.etcd().address();
    let replica = |flags: &[&str]| {
        let own = ["--etcd", &address, "--peer-listen", "127.0.0.1:0", "--lease-ttl", "2"];
        Process::start("elastic-coordinator", &[&own[..], flags].concat())
    };
    let plain_replica = replica(&[]);
    let (health, a_flags, b_flags) = (free_port(), pki.flags("a"), pki.flags("b"));
    let open_health = format!("--health-port=0.0.0.0:{health}");
    let mut a = job.start_with("a", &[&words(&a_flags)[..], &[&open_health]].concat());
    let mut b = job.start_with("b", &words(&b_flags));
    let first = job.runs(1, 2).await;

    // A replica without certificates leaves the job alone; one that has them takes the lead
    let text = "left to its agents: its agents speak TLS with each other";
    eventually("the plain replica says why", LIMIT, async || plain_replica.output().contains(text).then_some(())).await;
    assert_ne!(job.leader().await.split('-').next(), Some("coordinator"));
    let web = format!("127.0.0.1:{}", free_port());
    let _replica = replica(&[&words(&pki.flags("coordinator"))[..], &["--http", &web]].concat());
    let led = async || job.leader().await.starts_with("coordinator").then_some(());
    eventually("the replica leads", LIMIT, led).await;

    // Nodes that cannot be of use are refused, and say why
    for (name, flags, why) in [
        ("c", vec![], "--peer-cert is not given here but given in the job"),
        (
            "d",
            others.flags("d").to_vec(),
            "the other end's certificate is of another authority than those in --peer-ca",
        ),
    ] {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut stranger = job.start_with(name, &flags);
        assert_eq!(stranger.exit(LIMIT).await, 1, "{}", stranger.output());
        assert!(stranger.output().contains(why), "{}", stranger.output());
    }
    assert_eq!(job.round().map(|round| round.number), Some(1), "the job continues");

    // Logs and health are for those who have a certificate
    let logs = async |flags: &[&str]| {
        output("elasticctl", &[&["--etcd", &address, "logs", "job"], flags].concat(), LIMIT).await
    };
    let read = logs(&words(&pki.flags("anna"))).await;
    assert!(read.status.success(), "{}", said(&read));
    let refused = logs(&[]).await;
    assert!(
        !refused.status.success() && said(&refused).contains("give this program --peer-cert"),
        "{}",
        said(&refused)
    );
    assert!(ask_health(&pki, health, true).await);
    assert!(!ask_health(&pki, health, false).await);

    // Both tell when their certificates end, here in a year
    let year = elastic_store::clock::epoch_ms() / 1000 + 365 * 86_400;
    for (at, name) in [
        (format!("https://127.0.0.1:{health}"), "elastic_agent_peer_certificate_expiry_timestamp_seconds{"),
        (format!("http://{web}"), "elastic_peer_certificate_expiry_timestamp_seconds"),
    ] {
        let end = certificate_end(&pki, &at, name).await;
        assert!(end.is_some_and(|end| end.abs_diff(year) < 2 * 86_400), "{at}: {end:?} {year}");
    }

    // Its leader hears the nodes, and acts on a death at once
    first.of("b").kill();
    let second = job.runs_within(2, 2, AT_ONCE).await;
    b.kill();
    let mut b = job.start_with("b", &words(&b_flags));
    job.runs_within(second.number + 1, 2, AT_ONCE).await;
    job.succeeds([&mut a, &mut b]).await;
}

#[tokio::test]
async fn the_store_that_an_agent_serves_is_for_those_with_a_certificate() {
    let pki = Pki::of(&["a", "b"]).await;
    let store = endpoint();
    let job = Job::met_by(&["--rdzv-backend=c10d", &store], "2").flag("--max-restarts=1");
    let mut a = job.start_with("a", &words(&pki.flags("a")));
    a.says("this agent serves the job's store", LIMIT).await;
    let mut plain = job.start("plain");
    assert_eq!(plain.exit(LIMIT).await, 1);
    let why = "it speaks TLS: give this node --peer-cert, --peer-key and --peer-ca";
    assert!(plain.output().contains(why), "{}", plain.output());
    a.says("does not speak TLS: give it --peer-cert", LIMIT).await;

    let mut b = job.start_with("b", &words(&pki.flags("b")));
    let first = job.runs(1, 2).await;
    first.of("b").kill();
    job.runs(2, 2).await;
    job.succeeds([&mut a, &mut b]).await;
}

#[tokio::test]
async fn a_coordinator_s_own_store_is_served_over_tls_to_etcd_s_clients_too() {
    let pki = Pki::of(&["store,127.0.0.1", "anna"]).await;
    // On all addresses, which needs no leave with TLS
    let flags = pki.flags("store");
    let port = free_port();
    let listen = format!("0.0.0.0:{port}");
    let serve = ["--embedded", "--listen", &listen, "--peer-listen", "127.0.0.1:0"];
    let server = Process::start("elastic-coordinator", &[&serve[..], &words(&flags)].concat());
    server.says("pulses at ", LIMIT).await;
    let file = |name: &str| pki.path(name).display().to_string();
    let address = format!("127.0.0.1:{port}");
    let jobs =
        async |flags: &[&str]| output("elasticctl", &[&["jobs", "--etcd", &address], flags].concat(), LIMIT).await;
    let own = jobs(&["--cacert", &file("ca.pem"), "--cert", &file("anna.pem"), "--key", &file("anna-key.pem")]).await;
    assert!(own.status.success(), "{}", said(&own));
    let refused = jobs(&["--cacert", &file("ca.pem")]).await;
    assert!(!refused.status.success() && said(&refused).contains("wants a client certificate"), "{}", said(&refused));

    let open = Process::start("elastic-coordinator", &["--embedded", "--listen", "0.0.0.0:0"]);
    let why = "could read and write the embedded store";
    eventually("it refuses to serve everybody", LIMIT, async || open.output().contains(why).then_some(())).await;
}

#[tokio::test]
async fn certificates_are_never_overwritten_and_their_keys_are_only_the_owners() {
    let pki = Pki::of(&["a"]).await;
    for file in ["ca-key.pem", "a-key.pem"] {
        let mode = std::fs::metadata(pki.path(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    let read = |file: &str| std::fs::read_to_string(pki.path(file)).unwrap();
    let before = ["ca.pem", "ca-key.pem", "a.pem", "a-key.pem"].map(read);
    for (what, names, why) in [
        ("authority", vec![], "an authority is never overwritten"),
        ("node", vec!["b", "a"], "is there already: --renew makes a new one"),
        ("node", vec!["--renew", "c"], "is not there: leave --renew out"),
        ("node", vec!["../a"], "is no name of a host"),
        ("node", vec!["ca"], "the authority has that name"),
    ] {
        let refused = pki.certs(&[what], &names).await;
        assert!(!refused.status.success() && said(&refused).contains(why), "{what} {names:?}: {}", said(&refused));
    }
    assert_eq!(["ca.pem", "ca-key.pem", "a.pem", "a-key.pem"].map(read), before);
    assert!(!pki.path("b.pem").exists(), "nothing is made where one is refused");
    // Again, by the same key
    pki.makes(&["node"], &["--renew", "a"]).await;
    assert_ne!(read("a.pem"), before[2]);
    assert_eq!(read("a-key.pem"), before[3]);
}

/// Certificates that hold for a short while, renewed as they run out, and a job whose every stream must open again after
/// the old ones have ended.
#[tokio::test]
#[ignore = "make chaos: certificates must run out"]
async fn a_job_outlives_its_certificates() {
    const VALID: Duration = Duration::from_secs(25);
    let pki = Pki::of(&[]).await;
    let valid = format!("{}s", VALID.as_secs());
    pki.makes(&["node"], &["--valid", &valid, "a", "b", "c", "late"]).await;
    let made = tokio::time::Instant::now();
    let job = Job::on_etcd("2:3").await.flag("--max-restarts=3").prompt();
    let flags = ["a", "b", "c", "late"].map(|name| pki.flags(name));
    let mut agents: Vec<_> =
        ["a", "b", "c"].iter().zip(&flags).map(|(name, flags)| job.start_with(name, &words(flags))).collect();
    let first = job.runs(1, 3).await;
    pki.makes(&["node"], &["--renew", "a", "b", "c"]).await;
    tokio::time::sleep_until(made + VALID + Duration::from_secs(1)).await;
    assert_eq!(job.round().map(|round| round.number), Some(first.number), "the job continues");

    // One whose certificate was not renewed says so
    let mut late = job.start_with("late", &words(&flags[3]));
    assert_eq!(late.exit(LIMIT).await, 1);
    assert!(late.output().contains("has ended at"), "{}", late.output());

    // With its leader gone, the others meet over new connections
    let leader = job.leader().await;
    let at = agents.iter().position(|agent| agent.name == leader).unwrap();
    agents.remove(at).kill();
    let second = job.runs_within(first.number + 1, 2, AT_ONCE).await;
    second.workers[0].kill();
    job.runs_within(second.number + 1, 2, AT_ONCE).await.exit(0);
    assert_eq!(exits(&mut agents).await, [0, 0]);
}
