//! The page as operators use it: in Chromium, which gets clicks and keys over its debugging pipe.

use elastic_tests::prelude::*;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::WITHIN;
use super::users::{Served, token};

const CHROMIUM: &str = "/usr/bin/chromium";

struct Page {
    to: Sender,
    from: BufReader<Receiver>,
    calls: u64,
    session: Option<String>,
    _browser: Child,
    _profile: TempDir,
}

impl Page {
    async fn open(address: &str) -> Page {
        let profile = tempfile::tempdir().unwrap();
        let (input, output) = (profile.path().join("in"), profile.path().join("out"));
        let made = Command::new("mkfifo").args([&input, &output]).status().await.unwrap();
        assert!(made.success());
        let to = OpenOptions::new().read_write(true).open_sender(&input).unwrap();
        let from = BufReader::new(OpenOptions::new().read_write(true).open_receiver(&output).unwrap());
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" 3<"$IN" 4>"$OUT""#, CHROMIUM, "--remote-debugging-pipe", "--headless"]);
        command.args([
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-sync",
            "--disable-dev-shm-usage",
        ]);
        command.args(["--disable-background-networking", "--disable-component-update", "--window-size=1280,900"]);
        // Its sandbox refuses to run as root. The page is our own.
        command.args(["--no-sandbox", &format!("--user-data-dir={}", profile.path().display())]);
        command.env("IN", &input).env("OUT", &output).stdout(Stdio::null()).stderr(Stdio::null());
        let browser = command.kill_on_drop(true).spawn().unwrap();
        let mut page = Page { to, from, calls: 0, session: None, _browser: browser, _profile: profile };
        let target = page.call("Target.createTarget", json!({ "url": "about:blank" })).await["targetId"].clone();
        let attached = page.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true })).await;
        page.session = attached["sessionId"].as_str().map(str::to_owned);
        page.call("Page.enable", json!({})).await;
        page.call("Page.navigate", json!({ "url": address })).await;
        page
    }

    async fn send(&mut self, method: &str, params: Value) -> u64 {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).await.unwrap();
        self.calls
    }

    async fn hears(&mut self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let heard = async {
            loop {
                let mut message = Vec::new();
                self.from.read_until(0, &mut message).await.unwrap();
                message.pop();
                let message: Value = serde_json::from_slice(&message).unwrap();
                if fits(&message) {
                    return message;
                }
            }
        };
        timeout(2 * WITHIN, heard).await.unwrap_or_else(|_| panic!("chromium does not say {what}"))
    }

    async fn call(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        let answer = self.hears(method, |message| message["id"] == id).await;
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    async fn evaluate(&mut self, script: &str) -> Value {
        let params = json!({ "expression": script, "returnByValue": true });
        self.call("Runtime.evaluate", params).await["result"]["value"].clone()
    }

    /// Waits until a script's value is neither null nor false.
    async fn until(&mut self, script: &str) -> Value {
        let there = async {
            loop {
                let value = self.evaluate(script).await;
                if !value.is_null() && value != false {
                    return value;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let found = timeout(2 * WITHIN, there).await.ok();
        match found {
            Some(value) => value,
            None => panic!("{script} does not hold of:\n{}", self.evaluate("document.body.innerText").await),
        }
    }

    async fn shows(&mut self, text: &str) {
        self.until(&format!("document.body.innerText.includes({})", json!(text))).await;
    }

    /// Clicks into the middle of the element that a script finds.
    async fn click(&mut self, element: &str) {
        let script = format!(
            "(() => {{ const found = {element}; if (!found) return null; found.scrollIntoView({{ block: 'center' }});
             const at = found.getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; }})()"
        );
        let at = self.until(&script).await;
        for kind in ["mousePressed", "mouseReleased"] {
            let params = json!({ "type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1 });
            // What the click opens may keep its answer.
            self.send("Input.dispatchMouseEvent", params).await;
        }
    }

    async fn types(&mut self, text: &str) {
        self.click("document.querySelector('input[type=password]')").await;
        self.until("document.activeElement.type === 'password'").await;
        self.evaluate("document.activeElement.value = ''").await;
        self.call("Input.insertText", json!({ "text": text })).await;
        self.click("document.querySelector('form button')").await;
    }
}

/// The button with this text, in the row of a node.
fn of_node(node: &str, text: &str) -> String {
    format!(
        "[...document.querySelectorAll('td button')].find((button) => button.textContent === '{text}'
         && button.closest('tr').firstChild.textContent === '{node}')"
    )
}

#[tokio::test]
async fn an_operator_s_clicks_exclude_and_drain_a_node_and_close_the_job_and_a_reader_has_no_buttons() {
    if !Path::new(CHROMIUM).exists() {
        return skip("CHROMIUM", "there is no /usr/bin/chromium to use the page with");
    }
    let (reader, reads) = token("rita", &[]).await;
    let (operator, operates) = token("olga", &["--role", "operate"]).await;
    let mut served = Served::start(&[&reads, &operates]).await;
    let mut page = Page::open(&format!("{}/#train", served.url)).await;

    // Given a token that is none, the page says so and asks again
    page.shows("This coordinator shows jobs to its users alone").await;
    page.types("nonsense").await;
    page.shows("no user has this token").await;
    page.types(&reader).await;
    page.shows("rita, who may read").await;
    assert_eq!(page.evaluate("document.querySelectorAll('button, form').length").await, 0);

    page.evaluate("sessionStorage.clear()").await;
    page.shows("This coordinator shows jobs to its users alone").await;
    page.types(&operator).await;
    page.shows("olga, who may operate").await;
    assert_eq!(page.evaluate("document.cookie + JSON.stringify(localStorage)").await, "{}", "kept in this tab alone");
    page.click(&of_node("b", "Exclude")).await;
    served.nodes[0].runs(2, 1, WITHIN).await.unwrap();
    page.shows("the operator excludes it: until it is included").await;
    page.click(&of_node("b", "Include")).await;
    served.nodes[0].runs(3, 2, WITHIN).await.unwrap();
    // A click lands where the button was, and the page is drawn again when the node is back.
    page.until(&format!("!!({})", of_node("b", "Exclude"))).await;
    page.click(&of_node("b", "Drain")).await;
    served.nodes[0].runs(4, 1, WITHIN).await.unwrap();
    page.shows("asked by olga (API): drain b").await;

    page.click("document.querySelector('button.danger')").await;
    let asks = page.hears("that it asks", |message| message["method"] == "Page.javascriptDialogOpening").await;
    assert!(asks["params"]["message"].as_str().unwrap().starts_with("Close job train?"), "{asks}");
    page.send("Page.handleJavaScriptDialog", json!({ "accept": true })).await;
    page.shows("asked by olga (API): close").await;
    page.until("!document.querySelector('button')").await;
    assert_eq!(served.scene.round().await.value.state.to_string(), "closed");
    drop(served.nodes);
}
