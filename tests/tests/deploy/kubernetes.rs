//! `deploy/kubernetes/`: what its manifests name is there; and its README followed, with a stand-in for `kubectl` that
//! keeps Secrets as folders. Each pod is a machine of [`Machines`], on which the container's own command line runs with
//! the pod's environment, files and user. What Kubernetes itself makes of the manifests is not seen here.

use elastic_tests::prelude::*;
use serde::Deserialize;

use super::blocks::blocks;
use super::deploy;
use super::machines::{Machines, printed};

const LIMIT: Duration = Duration::from_secs(90);

/// Exit code of an agent that left as planned.
const LEFT: i32 = 3;
/// Exit code of an agent whose job has failed for good.
const FAILED: i32 = 5;

/// The pods, and where they are. The first is the operator's machine too: what `kubectl port-forward` leads to is there.
const PODS: [(&str, &str); 4] = [
    ("elastic-etcd", "10.0.0.10"),
    ("elastic-coordinator", "10.0.0.20"),
    ("digits-0", "10.0.0.30"),
    ("digits-1", "10.0.0.31"),
];

/// Where the stand-in for kubectl keeps Secrets, and notes which files were applied.
const KUBECTL: &str = r#"#!/bin/sh
set -eu
case "$1 $2" in
"create secret")
    shift 3
    folder=/srv/secrets/$1
    mkdir -p "$folder"
    shift
    for word; do
        word=${word#--from-file=}
        cp "${word#*=}" "$folder/${word%%=*}"
    done
    ;;
"apply -f") shift && for word; do [ "$word" = -f ] || echo "$word" >> /srv/applied; done ;;
*) echo "kubectl $*: not supported here" >&2 && exit 1 ;;
esac
"#;

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

fn objects(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(deploy("kubernetes").join(file)).unwrap();
    let object = |document| Value::deserialize(document).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_norway::Deserializer::from_str(&text).map(object).collect()
}

const FILES: [&str; 4] = ["store.yaml", "etcd.yaml", "coordinator.yaml", "job.yaml"];

fn manifests() -> Vec<Value> {
    FILES.into_iter().flat_map(objects).collect()
}

fn named<'a>(manifests: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = manifests.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

/// The pod template of a workload, if it is one, and its only container.
fn template(object: &Value) -> Option<(&Value, &Value)> {
    let spec = object.pointer("/spec/template/spec")?;
    assert_eq!(list(&spec["containers"]).len(), 1);
    Some((spec, &spec["containers"][0]))
}

/// The number of a container's port of this name.
fn port(container: &Value, name: &Value) -> i64 {
    let port = list(&container["ports"]).iter().find(|port| port["name"] == *name);
    port.unwrap_or_else(|| panic!("there is no port {name}"))["containerPort"].as_i64().unwrap()
}

/// Of the oldest release that the README names, and of a later one.
#[test]
#[ignore = "needs kubernetes-validate: make chaos"]
fn the_manifests_fit_kubernetes_own_schemas() {
    const VALIDATE: &str = "kubernetes-validate";
    if Command::new(VALIDATE).arg("--version").output().is_err() {
        return skip("KUBERNETES_VALIDATE", format_args!("{VALIDATE} is not installed (pip install {VALIDATE})"));
    }
    for version in ["1.31", "1.34"] {
        let files = FILES.map(|file| deploy("kubernetes").join(file));
        let validate = &mut Command::new(VALIDATE);
        let output = validate.args(["--strict", "--kubernetes-version", version]).args(files).output().unwrap();
        assert!(output.status.success(), "{version}: {}", printed(&output));
    }
}

#[test]
fn what_the_manifests_name_is_there() {
    let manifests = manifests();
    let readme = std::fs::read_to_string(deploy("kubernetes/README.md")).unwrap();
    let mut seen = BTreeSet::new();
    for object in &manifests {
        assert!(object["apiVersion"].is_string(), "{object}");
        assert!(seen.insert((text(&object["kind"]), text(&object["metadata"]["name"]))), "twice: {object}");
        let Some((spec, container)) = template(object) else { continue };
        // A workload finds its own pods; a Job makes a selector of its own.
        let labels = object.pointer("/spec/template/metadata/labels").expect("labels");
        assert!(object["kind"] == "Job" || object["spec"]["selector"]["matchLabels"] == *labels, "{object}");
        if let Some(account) = spec.get("serviceAccountName") {
            named(&manifests, "ServiceAccount", text(account));
        }
        for variable in list(&container["env"]) {
            if let Some(source) = variable.pointer("/valueFrom/configMapKeyRef") {
                let map = named(&manifests, "ConfigMap", text(&source["name"]));
                assert!(map["data"][text(&source["key"])].is_string(), "{source}");
            }
        }
        let claims = list(&object["spec"]["volumeClaimTemplates"]).iter().map(|claim| &claim["metadata"]["name"]);
        let volumes: BTreeSet<&str> =
            list(&spec["volumes"]).iter().map(|volume| &volume["name"]).chain(claims).map(text).collect();
        let mounted = list(&container["volumeMounts"]).iter().map(|mount| text(&mount["name"])).collect();
        assert_eq!(volumes, mounted, "{}", object["kind"]);
        for volume in list(&spec["volumes"]) {
            if let Some(secret) = volume.get("secret") {
                let name = text(&secret["secretName"]);
                let made = ["operator", "agents"].map(|user| format!("elastic-{user}")).contains(&name.to_owned());
                assert!(made || readme.contains(&format!("secret generic {name} ")), "the README does not make {name}");
            }
            if let Some(claim) = volume.get("persistentVolumeClaim") {
                named(&manifests, "PersistentVolumeClaim", text(&claim["claimName"]));
            }
        }
        for probe in ["livenessProbe", "readinessProbe"].iter().filter_map(|probe| container.get(probe)) {
            port(container, &probe["httpGet"]["port"]);
        }
    }
    for service in manifests.iter().filter(|object| object["kind"] == "Service") {
        let pods =
            |object: &&Value| object.pointer("/spec/template/metadata/labels") == Some(&service["spec"]["selector"]);
        let (_, container) = manifests.iter().find(pods).and_then(template).expect("pods behind a Service");
        for open in list(&service["spec"]["ports"]) {
            port(container, &open["targetPort"]);
        }
    }

    // What the Job does at an agent's end is what the agent's exit codes mean.
    let job = named(&manifests, "Job", "digits");
    let at = |code: i32| {
        let mut rules = list(&job["spec"]["podFailurePolicy"]["rules"]).iter();
        rules.find(|rule| list(&rule["onExitCodes"]["values"]).contains(&json!(code))).map(|rule| text(&rule["action"]))
    };
    assert_eq!((at(LEFT), at(FAILED), at(1)), (Some("Ignore"), Some("FailJob"), None));
}

struct Pod {
    name: &'static str,
    container: Value,
    /// `terminationGracePeriodSeconds`.
    grace: Duration,
    process: Process,
}

struct Site {
    // Pods end before the machines that they run on.
    pods: Vec<Pod>,
    machines: Machines,
    manifests: Vec<Value>,
}

impl Drop for Site {
    fn drop(&mut self) {
        for pod in &mut self.pods {
            pod.process.kill();
            if std::thread::panicking() {
                let log = self.machines.named(pod.name).path("/run/log");
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let lines: Vec<_> = text.lines().collect();
                eprintln!("--- {}\n{}", pod.name, lines[lines.len().saturating_sub(25)..].join("\n"));
            }
        }
    }
}

impl Site {
    fn new() -> Option<Site> {
        let machines = Machines::new(&PODS)?;
        let shared = machines.shared();
        std::fs::create_dir(&shared).unwrap();
        for machine in &machines.all {
            for program in ["elastic-agent", "elastic-trainer", "elastic-coordinator", "elasticctl"].map(binary) {
                // A link would lead nowhere where they were built under /tmp: a pod gets a /tmp of its own.
                let (program, name) = (program.display(), program.file_name().unwrap().display());
                machine.run(&format!("touch /usr/local/bin/{name}; mount --bind {program} /usr/local/bin/{name}"));
            }
        }
        let operator = &machines.all[0];
        operator.run(&format!(
            "mkdir /srv/elastic && cp -r {} /srv/elastic/",
            deploy("").canonicalize().unwrap().display()
        ));
        std::fs::write(operator.path("/usr/local/bin/kubectl"), KUBECTL).unwrap();
        operator.run("chmod 755 /usr/local/bin/kubectl");
        Some(Site { pods: Vec::new(), machines, manifests: manifests() })
    }

    /// Runs a script on the operator's machine, in the folder of the manifests.
    fn operator(&self, script: &str) -> String {
        let output = self.machines.all[0].output("/srv/elastic/deploy/kubernetes", script);
        assert!(output.status.success(), "{script}\n{}", printed(&output));
        printed(&output)
    }

    /// Gives a machine the files of its pod, as the manifest mounts them.
    fn mount(&self, name: &str, spec: &Value) {
        let machine = self.machines.named(name);
        let group = spec["securityContext"]["fsGroup"].as_i64().unwrap();
        let mounts = list(&spec["containers"][0]["volumeMounts"]);
        let volume = |mount: &Value| list(&spec["volumes"]).iter().find(|volume| volume["name"] == mount["name"]);
        // What lies in the temporary folder is reached before a pod's own covers it.
        let (empty, other): (Vec<_>, Vec<_>) =
            mounts.iter().partition(|mount| volume(mount).is_some_and(|volume| volume.get("emptyDir").is_some()));
        for mount in other {
            let path = text(&mount["mountPath"]);
            if let Some(secret) = volume(mount).and_then(|volume| volume.get("secret")) {
                machine.run(&format!("mkdir -p {path}"));
                let from = self.machines.all[0].path(&format!("/srv/secrets/{}", text(&secret["secretName"])));
                for file in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
                    std::fs::copy(file.path(), machine.path(path).join(file.file_name())).unwrap();
                }
                machine.run(&format!("chown -R root:{group} {path} && chmod 440 {path}/*"));
            } else {
                // Where a pod that is started again finds what it has written.
                let claim = self.machines.shared().join(text(&mount["name"]));
                std::fs::create_dir_all(&claim).unwrap();
                machine.mount(&claim, path);
                machine.run(&format!("chown root:{group} {path} && chmod 2770 {path}"));
            }
        }
        for mount in empty {
            machine.run(&format!("mount -t tmpfs -o mode=1777 none {}", text(&mount["mountPath"])));
        }
    }

    fn environment(&self, name: &str, container: &Value) -> BTreeMap<String, String> {
        let mut environment = BTreeMap::new();
        if let Some(index) = name.strip_prefix("digits-") {
            environment.insert("JOB_COMPLETION_INDEX".to_owned(), index.to_owned());
        }
        for variable in list(&container["env"]) {
            let source = &variable["valueFrom"];
            let value = if let Some(map) = source.get("configMapKeyRef") {
                text(&named(&self.manifests, "ConfigMap", text(&map["name"]))["data"][text(&map["key"])])
            } else if let Some(field) = source.get("fieldRef") {
                assert_eq!(field["fieldPath"], "status.podIP");
                address(name)
            } else {
                text(&variable["value"])
            };
            environment.insert(text(&variable["name"]).to_owned(), value.to_owned());
        }
        environment
    }

    fn start(&mut self, name: &'static str, kind: &str, workload: &str) {
        let (spec, container) = template(named(&self.manifests, kind, workload)).expect("a workload");
        let machine = self.machines.named(name);
        let log = machine.path("/run/log");
        if !log.exists() {
            self.mount(name, spec);
        }
        let environment = self.environment(name, container);
        let security = &spec["securityContext"];
        let mut words: Vec<String> = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin"].map(str::to_owned).to_vec();
        words.extend(environment.iter().map(|(name, value)| format!("{name}={value}")));
        words.extend(["setpriv", "--pdeathsig=KILL", "--no-new-privs", "--bounding-set=-all"].map(str::to_owned));
        for (flag, id) in [("reuid", "runAsUser"), ("regid", "runAsGroup"), ("groups", "fsGroup")] {
            words.push(format!("--{flag}={}", security[id]));
        }
        words.push("--".to_owned());
        let command = list(&container["command"]).iter().chain(list(&container["args"]));
        words.extend(command.map(|word| expanded(text(word), &environment)));
        let process = Process::spawn(name, machine.command(&words), &log);
        let grace = Duration::from_secs(spec["terminationGracePeriodSeconds"].as_u64().unwrap_or(30));
        self.pods.push(Pod { name, container: container.clone(), grace, process });
    }

    fn pod(&mut self, name: &str) -> &mut Pod {
        self.pods.iter_mut().find(|pod| pod.name == name).unwrap()
    }

    fn terminate(&mut self, name: &str) {
        self.pod(name).process.signal(Signal::TERM);
    }

    /// SIGTERM to a pod, which must end within its grace: its exit code.
    async fn stop(&mut self, name: &str) -> i32 {
        self.terminate(name);
        self.ends(name).await
    }

    async fn ends(&mut self, name: &str) -> i32 {
        let at = self.pods.iter().position(|pod| pod.name == name).unwrap();
        let grace = self.pods[at].grace;
        let code = self.pods[at].process.exit(grace).await;
        self.pods.remove(at);
        code
    }

    /// What a pod's probe is answered: whether it passes, and the text.
    fn probe(&self, name: &str, probe: &str) -> (bool, String) {
        let pod = self.pods.iter().find(|pod| pod.name == name).unwrap();
        let (get, seconds) = (&pod.container[probe]["httpGet"], &pod.container[probe]["timeoutSeconds"]);
        let scheme = get["scheme"].as_str().unwrap_or("HTTP").to_lowercase();
        let url = format!("{scheme}://{}:{}{}", address(name), port(&pod.container, &get["port"]), text(&get["path"]));
        let seconds = seconds.as_u64().unwrap_or(1).max(5);
        let curl = format!(
            "curl --silent --show-error --insecure --max-time {seconds} --write-out '\\n%{{http_code}}' {url} || true"
        );
        let said = self.machines.named(name).run(&curl);
        (said.trim_end().ends_with("\n200"), said)
    }

    async fn is(&self, name: &str, probe: &str, passes: bool, says: &str) {
        let asked = async || {
            let (passed, said) = self.probe(name, probe);
            (passed == passes && said.contains(says)).then_some(())
        };
        eventually(&format!("{probe} of {name}: {passes}, {says:?}"), LIMIT, asked).await;
    }

    /// The job, as operators see it: null while there is none yet.
    fn describe(&self) -> Value {
        let script = "export ELASTIC_ETCD=localhost:2379 ELASTIC_ETCD_CACERT=certs/ca.pem \
                      ELASTIC_ETCD_CERT=certs/operator.pem ELASTIC_ETCD_KEY=certs/operator-key.pem \
                      ELASTIC_ETCD_USER=elastic-operator ELASTIC_ETCD_PASSWORD_FILE=passwords/elastic-operator\n\
                      elasticctl describe digits -o json";
        let output = self.machines.all[0].output("/srv/elastic/deploy/kubernetes", script);
        if !output.status.success() && printed(&output).contains("there is no job \"digits\"") {
            return Value::Null;
        }
        assert!(output.status.success(), "{}", printed(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Waits until the job runs in these pods.
    async fn trains_in(&self, pods: &[&str]) {
        let trains = async || {
            let round = &self.describe()["round"];
            (round["state"] == "running" && round["world_size"] == pods.len()).then_some(())
        };
        eventually(&format!("the job runs in {pods:?}"), LIMIT, trains).await;
        for pod in pods {
            self.is(pod, "readinessProbe", true, "").await;
        }
    }
}

fn address(pod: &str) -> &'static str {
    PODS.iter().find(|(name, _)| *name == pod).unwrap().1
}

/// A word of a container's command line, with `$(NAME)` filled in.
fn expanded(word: &str, environment: &BTreeMap<String, String>) -> String {
    let mut word = word.to_owned();
    for (name, value) in environment {
        word = word.replace(&format!("$({name})"), value);
    }
    assert!(!word.contains("$("), "{word}: there is no such variable");
    word
}

#[tokio::test]
async fn pods_are_live_ready_and_leave_as_the_manifests_say() {
    let Some(mut site) = Site::new() else { return };
    let readme = std::fs::read_to_string(deploy("kubernetes/README.md")).unwrap();

    // Given the README, followed until etcd and its users are there
    let mut applied = String::new();
    for block in blocks(&readme).iter().filter(|block| !block.place.starts_with("Not in the test")) {
        assert_eq!(block.place, "On the operator's machine");
        site.operator(&block.script);
        applied = site.operator("touch /srv/applied; cat /srv/applied; rm /srv/applied");
        if applied.contains("etcd.yaml") {
            site.start("elastic-etcd", "StatefulSet", "elastic-etcd");
            site.is("elastic-etcd", "readinessProbe", true, "").await;
        }
    }
    assert_eq!(applied, "coordinator.yaml\njob.yaml\n");
    assert_eq!(text(&named(&site.manifests, "ConfigMap", "elastic-store")["data"]["endpoints"]), "elastic-etcd:2379");

    // When the pods start while etcd is away, then none is killed for it
    site.stop("elastic-etcd").await;
    site.start("elastic-coordinator", "Deployment", "elastic-coordinator");
    site.start("digits-0", "Job", "digits");
    site.start("digits-1", "Job", "digits");
    for agent in ["digits-0", "digits-1"] {
        let waits = "waiting for the store at elastic-etcd:2379";
        site.is(agent, "livenessProbe", true, waits).await;
        site.is(agent, "readinessProbe", false, waits).await;
    }
    site.is("elastic-coordinator", "livenessProbe", true, "").await;
    site.is("elastic-coordinator", "readinessProbe", false, "").await;
    // `kubectl port-forward` comes to a pod's loopback.
    assert!(
        site.machines.named("digits-0").run("curl --silent localhost:8080/ready").contains("waiting for the store")
    );
    site.machines.named("elastic-coordinator").run("curl --silent --fail --insecure https://localhost:9400/live");

    // When it comes, then all become ready, and the job trains, led by the coordinator
    site.start("elastic-etcd", "StatefulSet", "elastic-etcd");
    site.is("elastic-coordinator", "readinessProbe", true, "").await;
    site.trains_in(&["digits-0", "digits-1"]).await;
    let leads = async || (site.describe()["leader"]["coordinator"] == true).then_some(());
    eventually("the coordinator leads", LIMIT, leads).await;

    // When a pod gets its signal to end, then it leaves within its grace, and the other continues
    assert_eq!(site.stop("digits-1").await, LEFT);
    site.trains_in(&["digits-0"]).await;

    // And the one in its place joins
    site.start("digits-1", "Job", "digits");
    site.trains_in(&["digits-0", "digits-1"]).await;
    site.is("digits-1", "livenessProbe", true, "").await;

    // A coordinator that goes takes no job along
    assert_eq!(site.stop("elastic-coordinator").await, 0);
    site.trains_in(&["digits-0", "digits-1"]).await;

    // When the Job is deleted, then what it has learned is on disk
    for pod in ["digits-0", "digits-1"] {
        site.terminate(pod);
    }
    assert_eq!((site.ends("digits-0").await, site.ends("digits-1").await), (LEFT, LEFT));
    assert!(site.describe()["checkpoint"].is_object(), "{}", site.describe());
}
