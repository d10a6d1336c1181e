//! Clients that mean harm, against the real program on the loopback interface: what each attack costs it in
//! memory, and what *filter* takes meanwhile. It prints a table and asserts counts and bytes, never times.
//!
//! Another program is measured the same way, without assertions: `GPUPACK_ATTACKED=/path/to/gpupack`; a fleet
//! of another size with `GPUPACK_ATTACK_NODES=5000`. For the times, run this test alone.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use runtime::clock::Clock;
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};

use crate::harness::turns::turn;

/// Most memory of the program under any attack.
const MOST_MIB: u64 = 300;

/// How long each attack lasts: as long as the counts and bytes take that are asserted, and longer for figures.
fn attack_time() -> Duration {
    Duration::from_secs(if variable("GPUPACK_ATTACKED").is_some() { 3 } else { 1 })
}

/// The timeout of every step of the test.
const LIMIT: Duration = Duration::from_secs(120);

/// A running demo.
struct Attacked {
    process: Child,
    address: SocketAddr,
    nodes: usize,
    is_own: bool,
}

impl Drop for Attacked {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[expect(clippy::disallowed_methods, reason = "the only way to measure another build")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Attacked {
    fn start() -> Self {
        let other = variable("GPUPACK_ATTACKED");
        let nodes = variable("GPUPACK_ATTACK_NODES").map_or(50, |nodes| nodes.parse().unwrap());
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let process = Command::new(other.as_deref().unwrap_or(env!("CARGO_BIN_EXE_gpupack")))
            .args(["demo", "--arrival-rate", "0", "--fill", "0.5"])
            .args(["--nodes", &nodes.to_string(), "--listen", &free.to_string()])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let attacked = Self { process, address: free, nodes, is_own: other.is_none() };
        let clock = Clock::start();
        let is_ready = || {
            let text = attacked.get("/metrics").unwrap_or_default();
            text.contains("gpupack_ready 1") && allocated(&text) > 0.4
        };
        while !is_ready() {
            assert!(clock.precise() < LIMIT, "the demo does not become ready");
            thread::sleep(Duration::from_millis(200));
        }
        attacked
    }

    fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn memory(&self, line: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let found = text.lines().find_map(|it| it.strip_prefix(line)).unwrap();
        found.split_whitespace().next().unwrap().parse::<u64>().unwrap() / 1024
    }

    /// Begins to note the most memory again.
    fn forget_peak(&self) {
        let _ = std::fs::write(format!("/proc/{}/clear_refs", self.process.id()), "5");
    }

    /// The body of a call about a pod.
    fn query(&self, name: &str) -> String {
        let names: Vec<String> = (0..self.nodes).map(|at| format!("\"node-{at:05}\"")).collect();
        query(name, &names.join(","))
    }
}

fn query(name: &str, names: &str) -> String {
    format!(
        "{{\"Pod\":{{\"metadata\":{{\"name\":\"{name}\",\"namespace\":\"team\",\"uid\":\"u-{name}\",\
         \"annotations\":{{\"gpu-fraction\":\"0.25\"}}}},\"spec\":{{\"schedulerName\":\"gpupack\",\
         \"containers\":[{{\"name\":\"main\"}}]}}}},\"Nodes\":null,\"NodeNames\":[{names}]}}"
    )
}

/// The part of all compute that is allocated.
fn allocated(metrics: &str) -> f64 {
    let sum = |state: &str| -> f64 {
        let of_state = metrics.lines().filter(|line| {
            line.starts_with("gpupack_share_gpus{") && line.contains(&format!("state=\"{state}\""))
        });
        of_state.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    sum("allocated") / (sum("allocated") + sum("free")).max(1.0)
}

fn head(verb: &str, length: usize) -> String {
    format!(
        "POST /v1/{verb} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

/// One call on a keep-alive connection. Returns the status.
fn call(stream: &mut TcpStream, verb: &str, body: &str) -> Option<u16> {
    stream.write_all(format!("{}{body}", head(verb, body.len())).as_bytes()).ok()?;
    let mut heard = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    loop {
        let count = stream.read(&mut bytes).ok().filter(|count| *count > 0)?;
        heard.extend_from_slice(&bytes[..count]);
        let Some(at) = heard.windows(4).position(|it| it == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&heard[..at]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
        if heard.len() >= at + 4 + length.parse::<usize>().ok()? {
            return head.split(' ').nth(1)?.parse().ok();
        }
    }
}

fn connect(address: SocketAddr) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    stream.set_write_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.set_nodelay(true).ok()?;
    Some(stream)
}

/// What kube-scheduler observed meanwhile.
#[derive(Default)]
struct Met {
    took: Vec<Duration>,
    failed: usize,
}

impl Met {
    fn quantile(&self, of_thousand: usize) -> Duration {
        let mut took = self.took.clone();
        took.sort_unstable();
        took.get((took.len() * of_thousand / 1000).min(took.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    }
}

/// Sends kube-scheduler's calls again and again on one connection, until stopping on a signal. A connection that was
/// closed while idle is no failure.
fn ask(attacked: &Attacked, stop: &AtomicBool) -> Met {
    let (body, clock, mut met) = (attacked.query("scheduler"), Clock::start(), Met::default());
    let mut stream = connect(attacked.address);
    while !stop.load(Ordering::SeqCst) {
        let started = clock.precise();
        let mut status = stream.as_mut().and_then(|stream| call(stream, "filter", &body));
        if status.is_none() {
            stream = connect(attacked.address);
            status = stream.as_mut().and_then(|stream| call(stream, "filter", &body));
        }
        met.took.push(clock.precise() - started);
        met.failed += usize::from(status != Some(200));
        thread::sleep(Duration::from_millis(5));
    }
    met
}

/// Runs an attack beside *filter*; what the attack found out. Attackers have the lowest priority: they stand for
/// other machines, whose CPUs are not the program's.
fn beside<T: Send>(attacked: &Attacked, name: &str, attack: impl FnOnce() -> T + Send) -> T {
    attacked.forget_peak();
    let stop = AtomicBool::new(false);
    let (found, met) = thread::scope(|scope| {
        let asking = scope.spawn(|| ask(attacked, &stop));
        let attacking = scope.spawn(|| {
            // Of this thread and those that it starts.
            setpriority_process(None, 19).unwrap();
            attack()
        });
        let found = attacking.join();
        stop.store(true, Ordering::SeqCst);
        (found.unwrap(), asking.join().unwrap())
    });
    let peak = attacked.memory("VmHWM:");
    let (half, most) = (met.quantile(500), met.quantile(990));
    let _ = writeln!(
        std::io::stderr(),
        "{name:<34} peak {peak:>5} MiB   filter: {:>5} calls, {:>3} failed, p50 {half:>9.1?}, p99 {most:>9.1?}",
        met.took.len(),
        met.failed
    );
    if attacked.is_own {
        assert!(peak < MOST_MIB, "{name}: {peak} MiB");
        assert_eq!(met.failed, 0, "{name}: filter was not answered");
    }
    found
}

/// Sends all but the end of 60 bodies of 32 MiB, and holds on to them.
fn bodies(address: SocketAddr) {
    let (piece, pieces) = (vec![b' '; 1 << 20], 32);
    thread::scope(|scope| {
        for _ in 0..60 {
            scope.spawn(|| {
                let mut stream = connect(address)?;
                stream.write_all(head("filter", piece.len() * pieces).as_bytes()).ok()?;
                (1..pieces).try_for_each(|_| stream.write_all(&piece)).ok()?;
                thread::sleep(attack_time());
                Some(())
            });
        }
    });
}

/// The same in pieces of one byte.
fn pieces(address: SocketAddr) {
    let chunks = b"1\r\nx\r\n".repeat(100_000);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut stream = connect(address)?;
                let head = "POST /v1/filter HTTP/1.1\r\nhost: localhost\r\n\
                    content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
                stream.write_all(head.as_bytes()).ok()?;
                (0..20).try_for_each(|_| stream.write_all(&chunks)).ok()?;
                thread::sleep(attack_time());
                Some(())
            });
        }
    });
}

/// Requests the largest answer 20 times and reads none.
fn answers(address: SocketAddr) {
    let ask = |_| {
        let mut stream = connect(address)?;
        stream.write_all(b"GET /v1/state HTTP/1.1\r\nhost: localhost\r\n\r\n").ok()?;
        Some(stream)
    };
    let held: Vec<Option<TcpStream>> = (0..20).map(ask).collect();
    thread::sleep(2 * attack_time());
    drop(held);
}

/// Half of the files that this process may open: the other half is for the tests that run beside this one.
fn half_of_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // Shells start programs with a low soft limit, often 1,024.
    let raised = Rlimit { current: limit.maximum, ..limit };
    let now = if setrlimit(Resource::Nofile, raised).is_ok() { raised } else { limit };
    now.current.unwrap_or(u64::MAX) / 2
}

/// Begins 2,000 requests, or as many as it may have files for, and ends none.
fn heads(address: SocketAddr) {
    let most = half_of_files().min(2_000);
    let held: Vec<TcpStream> = (0..most).map_while(|_| connect(address)).collect();
    for mut stream in &held {
        let _ = stream.write_all(b"POST /v1/filter HTTP/1.1\r\nhost: ");
    }
    thread::sleep(attack_time());
    drop(held);
}

/// Calls with bodies of this kind, `count` at least and as long as an attack takes; the statuses.
fn calls(
    (address, verb): (SocketAddr, &str),
    count: usize,
    body: impl Fn(usize) -> String,
) -> Vec<Option<u16>> {
    let clock = Clock::start();
    let one = |at| connect(address).and_then(|mut stream| call(&mut stream, verb, &body(at)));
    (0..).take_while(|at| *at < count || clock.precise() < attack_time()).map(one).collect()
}

#[test]
fn no_attack_slows_kube_scheduler_or_fills_memory() {
    let _turn = turn();
    let attacked = Attacked::start();
    let address = attacked.address;
    beside(&attacked, "nothing", || thread::sleep(attack_time()));
    beside(&attacked, "60 bodies of 32 MiB, held", || bodies(address));
    beside(&attacked, "8 bodies in pieces of a byte", || pieces(address));
    beside(&attacked, "20 answers that no client reads", || answers(address));
    beside(&attacked, "2,000 heads without an end", || heads(address));
    let long = "x".repeat(8 << 20);
    let names = beside(&attacked, "10 pods with names of 8 MiB", || {
        calls((address, "filter"), 10, |at| query(&format!("{at}-{long}"), "\"node-00000\""))
    });
    let many = vec!["\"n\""; 1_000_000].join(",");
    let nodes = beside(&attacked, "5 lists of 1,000,000 nodes", || {
        calls((address, "filter"), 5, |at| query(&format!("many-{at}"), &many))
    });
    let empty = vec!["{}"; 1_300_000].join(",");
    let lists = ["filter", "preempt"].map(|verb| {
        beside(&attacked, &format!("5 pods of empty containers, {verb}"), || {
            let pod = format!("{{\"Pod\":{{\"spec\":{{\"containers\":[{empty}]}}}}}}");
            calls((address, verb), 5, |_| pod.clone())
        })
    });
    beside(&attacked, "nothing, once more", || thread::sleep(attack_time()));
    let _ = writeln!(std::io::stderr(), "afterwards {} MiB", attacked.memory("VmRSS:"));
    if attacked.is_own {
        assert!(
            names
                .iter()
                .chain(&nodes)
                .chain(lists.iter().flatten())
                .all(|status| *status == Some(400)),
            "{names:?} {nodes:?} {lists:?}"
        );
    }
}
