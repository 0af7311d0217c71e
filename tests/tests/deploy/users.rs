//! `users.sh` of `deploy/etcd`: what each user may do, and a job whose agents, operators and readers are those that it
//! makes.

use elastic_tests::prelude::*;
use etcd_client::PutOptions;

use crate::deploy::machines::printed;
use crate::deploy::scripts::script;

/// An etcd, a folder of passwords, and an etcdctl that notes how it is called.
pub(super) struct Users {
    pub(super) etcd: EtcdServer,
    dir: TempDir,
}

const USERS: [&str; 7] = [
    "root",
    "elastic-reader",
    "elastic-operator",
    "elastic-agents",
    "elastic-agents-job",
    "elastic-operator-job",
    "elastic-reader-job",
];

impl Users {
    async fn new() -> Users {
        Users::on(EtcdOptions::default()).await
    }

    pub(super) async fn on(options: EtcdOptions) -> Users {
        // Logging in is not what is tested here: as cheap as it gets, not a tenth of a second.
        let etcd = EtcdServer::start(options.args(["--bcrypt-cost=4"])).await;
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
        // What `refused` names is refused once, in etcd's words.
        let noting = format!(
            r#"#!/bin/sh
cd {}
echo "$*" >> calls
if [ "$(head -n 1 refused)" = "$1 $2" ]; then
    sed -i 1d refused
    echo "Error: etcdserver: permission denied" >&2
    exit 1
fi
exec {} "$@"
"#,
            dir.display(),
            real.display()
        );
        std::fs::write(dir.join("refused"), "").unwrap();
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

    /// All users, of job `job` too.
    pub(super) fn made(self) -> Users {
        self.ok(&["--passwords", "passwords"]);
        for kind in ["job", "operator", "reader"] {
            self.ok(&["--passwords", "passwords", kind, "job"]);
        }
        self.etcd.note_auth();
        self
    }

    fn password_file(&self, user: &str) -> String {
        self.dir.path().join("passwords").join(user).display().to_string()
    }

    pub(super) fn job(&self, user: &str, nnodes: &str) -> Job {
        Job::on(&self.etcd, nnodes).conf("user", user).conf("password_file", &self.password_file(user))
    }

    /// `elasticctl` as this user.
    async fn elasticctl(&self, user: &str, args: &[&str]) -> Output {
        let (at, file) = (self.etcd.address(), self.password_file(user));
        output("elasticctl", &[&["--etcd", &at, "--user", user, "--password-file", &file], args].concat(), LIMIT).await
    }

    pub(super) async fn asks(&self, user: &str, args: &[&str]) -> String {
        let done = self.elasticctl(user, args).await;
        assert!(done.status.success(), "{user} {args:?}: {}", printed(&done));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// The one line for who may not: it names the user, the right and the key.
    async fn is_refused(&self, user: &str, args: &[&str], right: &str) {
        let done = self.elasticctl(user, args).await;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!((done.status.code(), said.lines().count()), (Some(1), 1), "{user} {args:?}: {said}");
        for part in [&*format!("permission denied for user {user:?}"), right, "grant-permission"] {
            assert!(said.contains(part), "{user} {args:?}: {part:?} is not in {said}");
        }
    }

    pub(super) async fn described(&self) -> Value {
        serde_json::from_str(&self.asks("elastic-reader-job", &["describe", "job", "-o", "json"]).await).unwrap()
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
    for (release, options) in EtcdOptions::of(["3.4", "3.5", "3.7"]) {
        eprintln!("on {release}");
        each_does_its_part(&Users::on(options).await.made()).await;
    }
}

async fn each_does_its_part(users: &Users) {
    let own = |key: &str| format!("/elastic/v1/jobs/job/{key}");
    let (round, wish, other) = (own("round"), own("desired"), "/elastic/v1/jobs/job2/round");

    // Who reads and writes the job, who wishes something of it, who reads and writes another one
    for (user, job, wishes, others) in [
        ("elastic-reader", "r", "", "r"),
        ("elastic-operator", "rw", "w", "rw"),
        ("elastic-agents", "rw", "w", "rw"),
        ("elastic-agents-job", "rw", "w", ""),
        ("elastic-operator-job", "r", "w", ""),
        ("elastic-reader-job", "r", "", ""),
    ] {
        let does = |what: &[&str]| users.does(user, what);
        let line = own("events/000000000001");
        assert_eq!(does(&["put", &round, "x"]), job.contains('w'), "{user} writes");
        assert_eq!(does(&["get", &round]), job.contains('r'), "{user} reads");
        assert_eq!(does(&["put", &wish, "x"]) && does(&["put", &line, "x"]), wishes == "w", "{user} wishes");
        assert_eq!(does(&["put", other, "x"]), others.contains('w'), "{user} writes another's job");
        assert_eq!(does(&["get", other]), others.contains('r'), "{user} reads another's job");
        assert!(!does(&["get", "/else"]) && !does(&["put", "/else", "x"]), "{user} elsewhere");
        assert!(!does(&["user", "list"]), "{user} manages users");
    }
    assert!(users.does("root", &["del", "--prefix", "/elastic/"]));

    // What docs/operations.md says of leases: some releases ask for no right to renew another's, all for one to end it
    let client = async |user: &str| users.etcd.client_of(user, &format!("secret-{user}")).await;
    let mut agents = client("elastic-agents-job").await;
    let lease = agents.lease_grant(60, None).await.unwrap().id();
    agents.put(own("nodes/a"), "x", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    let mut reader = client("elastic-reader").await;
    let mut root = users.etcd.client_of("root", "secret-root").await;
    let version = root.status().await.unwrap().version().to_owned();
    let faults = elastic_store::etcd::faults_of(&version).expect("a version of etcd's");
    let any_user = faults.iter().any(|fault| fault.fault.contains("any user can renew"));
    assert_eq!(reader.lease_keep_alive(lease).await.is_ok(), any_user, "etcd {version}");
    assert!(reader.lease_revoke(lease).await.is_err(), "a reader ends another's lease");
}

/// The processes that this one has started, and those that they have.
fn descendants(pid: u32) -> Vec<u32> {
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        let children = std::fs::read_to_string(thread.ok()?.path().join("children")).ok()?;
        Some(children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>())
    };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process that lives");
    let children: Vec<u32> = threads.filter_map(of_thread).flatten().collect();
    children.iter().flat_map(|&child| [vec![child], descendants(child)].concat()).collect()
}

/// What no program may tell: a password, and the job's secret, which only its agents and `elasticctl logs` read.
struct Secrets(Vec<String>);

impl Secrets {
    fn of(users: &Users) -> Secrets {
        let client = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .env("ETCDCTL_USER", "root:secret-root")
            .args(["--endpoints", &users.etcd.address(), "get", "--print-value-only", "/elastic/v1/jobs/job/secret"])
            .output()
            .expect("etcdctl");
        let record: Value = serde_json::from_slice(&client.stdout).expect("the job's secret");
        Secrets(vec!["secret-elastic".into(), record["key"].as_str().expect("a key").to_owned()])
    }

    fn are_not_in(&self, what: &str, text: &str) {
        assert!(!text.is_empty(), "{what} is empty");
        assert!(!self.0.iter().any(|secret| text.contains(secret)), "{what} tells a secret:\n{text}");
    }

    /// In what everyone on the host, or the user, can read of a process.
    fn are_not_told_of(&self, pid: u32) {
        for file in ["cmdline", "environ"] {
            let text = std::fs::read(format!("/proc/{pid}/{file}")).expect("a process that lives");
            self.are_not_in(&format!("{file} of {pid}"), &String::from_utf8_lossy(&text));
        }
    }
}

#[tokio::test]
async fn a_job_needs_no_more_than_its_own_users_and_tells_no_secret() {
    let users = Users::new().await.made();
    let (operator, reader) = ("elastic-operator-job", "elastic-reader-job");

    // Given a job whose agents are the user of this job, which log all that they can
    let job = users.job("elastic-agents-job", "1:2").flag("--max-restarts=1").flag("-vv");
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;

    // Then nothing tells a secret
    let secrets = Secrets::of(&users);
    for agent in &agents {
        let own = descendants(agent.pid());
        assert!(own.contains(&first.of(&agent.name).pid) && own.len() > 1, "its worker and its guard: {own:?}");
        own.into_iter().chain([agent.pid()]).for_each(|pid| secrets.are_not_told_of(pid));
    }
    for what in [&["jobs"][..], &["describe", "job"], &["events", "job"]] {
        let user = if what[0] == "jobs" { "elastic-reader" } else { reader };
        secrets.are_not_in(&format!("{what:?}"), &users.asks(user, &[what, &["-o", "json"]].concat()).await);
    }

    // And who may read its keys sees what its workers print, as docs/operations.md warns
    users.asks(reader, &["logs", "job"]).await;

    // When a worker fails, then the job's users are enough to form the next round
    first.workers[0].exit(7);
    let second = job.runs(first.number + 1, 2).await;
    assert_eq!(second.restarts(), 1);

    // The operator of the job may ask for things of it...
    users.asks(operator, &["drain", "job", "b"]).await;
    let third = job.runs(second.number + 1, 1).await;
    assert_eq!((third.nodes(), third.restarts()), (vec!["a"], 1));
    users.asks(operator, &["undrain", "job", "b"]).await;
    users.asks(operator, &["exclude", "job", "b"]).await;
    users.asks(operator, &["pause", "job"]).await;
    job.none_is_left(LIMIT).await;
    users.asks(operator, &["resume", "job"]).await;
    let fourth = job.runs(third.number + 1, 1).await;

    // ...but no reader may, nor may he ask for anything of other jobs
    users.is_refused(reader, &["pause", "job"], "to write /elastic/v1/jobs/job/desired, ").await;
    users.is_refused("elastic-reader", &["pause", "job"], "to write /elastic/v1/jobs/job/desired, ").await;
    users.is_refused(operator, &["jobs"], "to read /elastic/v1/jobs/*.").await;

    // An agent of another job reports whose rights are missing, and ends
    let other = users.job("elastic-agents-job", "1").named("other");
    let mut stranger = other.start("c");
    assert_eq!(stranger.exit(LIMIT).await, 1, "{}", stranger.output());
    let said = stranger.output();
    let last = said.lines().find(|line| line.starts_with("elastic-agent: ")).expect("its last word");
    assert!(last.contains("user \"elastic-agents-job\"") && last.contains("/elastic/v1/jobs/other/"), "{said}");

    fourth.workers[0].exit(0);
    assert_eq!(exits(&mut agents).await[0], 0, "{}", agents[0].output());
    users.is_refused(operator, &["delete", "job"], "to write /elastic/v1/jobs/job/").await;
    agents.iter().for_each(|agent| secrets.are_not_in("an agent's log", &agent.output()));
    assert!(agents[0].output().contains(" DEBUG "), "it has logged all: {}", agents[0].output());
}

#[tokio::test]
#[ignore = "takes a minute; make chaos runs it"]
async fn tokens_that_end_in_the_middle_of_a_job_cost_it_nothing() {
    for (release, plain) in EtcdOptions::of(["3.4", "3.5", "3.7"]) {
        let (signed, _key) = signed_tokens(plain.clone(), "2s");
        for (kind, options) in [("simple", plain.args(["--auth-token-ttl=1"])), ("signed", signed)] {
            outlives_its_tokens(&format!("{release}, {kind} tokens"), options).await;
        }
    }
}

/// The round that ran first runs, and all its workers live.
pub(super) async fn is_untouched(users: &Users, first: &Round, when: &str) {
    let seen = users.described().await;
    assert_eq!(seen["round"]["number"], first.number, "{when}: {seen}");
    assert!(first.workers.iter().all(|worker| worker.is_alive()), "{when}: {seen}");
}

/// A job of two nodes that a coordinator leads, all with tokens that last a second or two.
async fn outlives_its_tokens(what: &str, options: EtcdOptions) {
    eprintln!("{what}");
    let mut users = Users::on(options).await.made();
    let (at, file) = (users.etcd.address(), users.password_file("elastic-operator"));
    let args = ["--etcd", &at, "--user", "elastic-operator", "--password-file", &file, "--peer-listen", "127.0.0.1:0"];
    let coordinator = Process::start("elastic-coordinator", &args);
    coordinator.says("pulses at ", LIMIT).await;
    let job = users.job("elastic-agents-job", "1:2").flag("--max-restarts=0");
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;

    // Time, which is what is tested here: a lease is renewed many times over, and each token ends
    tokio::time::sleep(Duration::from_secs(8)).await;
    is_untouched(&users, &first, &format!("{what}, after some time")).await;
    // Users and roles that come, and a password that is set again, to the same
    users.etcd.add_role("secret-root", "another").await;
    users.etcd.forget_tokens("secret-root", "elastic-agents-job", "secret-elastic-agents-job").await;
    users.etcd.forget_tokens("secret-root", "elastic-operator", "secret-elastic-operator").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    is_untouched(&users, &first, &format!("{what}, after a change of users")).await;
    // Rights that are taken away for a while: who leads says so, and no one is replaced
    let role = "elastic-operator";
    users.etcd.client_of("root", "secret-root").await.user_revoke_role(role, role).await.expect("take the role");
    coordinator.says("cannot lead the job, so no failure is handled: ", LIMIT).await;
    let log = coordinator.output();
    assert!(log.contains("permission denied for user \"elastic-operator\", who needs the right to read"), "{log}");
    users.etcd.client_of("root", "secret-root").await.user_grant_role(role, role).await.expect("give it back");
    is_untouched(&users, &first, &format!("{what}, after its role was away")).await;
    // etcd restarts
    users.etcd.restart().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    is_untouched(&users, &first, &format!("{what}, after a restart of etcd")).await;

    // And the watches that were there all the time still tell of what comes
    users.asks("elastic-operator-job", &["drain", "job", "b"]).await;
    let second = job.runs(first.number + 1, 1).await;
    assert_eq!((second.number, second.restarts()), (first.number + 1, 0), "{what}");
    agents[1].exit(LIMIT).await;
    second.workers[0].exit(0);
    assert_eq!(agents[0].exit(LIMIT).await, 0, "{what}: {}", agents[0].output());
    let ended = eventually("the job has ended", LIMIT, async || {
        let seen = users.described().await;
        (seen["state"] == "succeeded").then_some(seen)
    })
    .await;
    assert_eq!(ended["evicted"], json!([]), "{what}: {ended}");
}

/// etcd 3.5 can refuse root for a moment after users have changed.
#[tokio::test]
async fn a_refusal_that_passes_is_logged_and_costs_no_user() {
    let users = Users::new().await;
    let refuse = |calls: &str| std::fs::write(users.dir.path().join("refused"), calls).unwrap();
    // Given an etcd that refuses each of these once, when users are made, then they are there
    refuse("user list\nuser add\nuser grant-role\n");
    let said = users.ok(&["--passwords", "passwords"]);
    users.etcd.note_auth();
    assert_eq!(said.matches("trying once more").count(), 3, "{said}");
    assert!(users.does("elastic-reader", &["get", "/elastic/x"]), "{said}");

    // But what is refused twice ends it
    refuse("user grant-role\nuser grant-role\n");
    let (done, said) = users.run(&["--passwords", "passwords", "job", "job"]);
    assert!(!done && said.matches("permission denied").count() == 2, "{said}");
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
