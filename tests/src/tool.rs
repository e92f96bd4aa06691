//! `adit-tool`: the client and server that tests put into pods, in an image of their own. What it finds out it prints
//! as JSON, one object a line.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Parser;
use serde::{Deserialize, Serialize};

use crate::sys::{check_interrupt, note_interrupts};

mod grpc;

/// A client or server in a pod.
#[derive(Debug, Parser)]
#[command(name = "adit-tool")]
enum Task {
    /// Do nothing until told to end
    Pause,
    /// Answer every line with who answers, who asks and the line; to HTTP, with the same as a page
    Serve {
        /// The ports
        #[arg(required = true)]
        ports: Vec<u16>,
        /// A port at which gRPC's health service says that all is well
        #[arg(long)]
        grpc: Option<u16>,
    },
    /// Call again and again; says how it goes each second and at the end
    Call(Call),
    /// Connect before anything else is done, and say how that went
    FirstConnect {
        /// Whom to connect to
        to: SocketAddr,
        /// Then do nothing until told to end, instead of ending
        #[arg(long)]
        stay: bool,
    },
}

#[derive(Debug, clap::Args)]
struct Call {
    /// Whom to call
    to: SocketAddr,
    /// Milliseconds from the beginning of one call to that of the next
    #[arg(long, default_value_t = 10)]
    interval: u64,
    /// So many calls; until told to end if neither this nor --seconds is given
    #[arg(long)]
    count: Option<u64>,
    /// For so long
    #[arg(long)]
    seconds: Option<u64>,
    /// All over one connection, instead of a new one for each
    #[arg(long)]
    one_connection: bool,
    /// Milliseconds that a call may take
    #[arg(long, default_value_t = 5000)]
    timeout: u64,
}

/// How calls went so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// All calls.
    pub calls: u64,
    /// Those that were answered.
    pub ok: u64,
    /// Those that were not.
    pub failed: u64,
    /// Why they were not, and how often.
    pub errors: BTreeMap<String, u64>,
    /// Who answered, and how often.
    pub servers: BTreeMap<String, u64>,
    /// The longest that a call took until its answer, in milliseconds.
    pub slowest_ms: u64,
}

/// How the first connection of a pod went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstConnect {
    /// Whether there was an answer.
    pub ok: bool,
    /// Why not, or the answer.
    pub detail: String,
    /// How long it took, in milliseconds.
    pub ms: u64,
}

/// Does what the command line says.
pub fn main() -> ExitCode {
    // Whatever else there is to do comes after the first connection.
    let begin = Instant::now();
    match run(Task::parse(), begin) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task, begin: Instant) -> anyhow::Result<()> {
    note_interrupts()?;
    match task {
        Task::Pause => pause(),
        Task::Serve { ports, grpc } => {
            if let Some(port) = grpc {
                let listener = listen(port)?;
                thread::spawn(move || grpc::serve(listener).map_err(|error| eprintln!("gRPC: {error:#}")));
            }
            for port in ports {
                let listener = listen(port)?;
                thread::spawn(move || serve(&listener));
            }
            pause();
        }
        Task::Call(call) => call_on(&call)?,
        Task::FirstConnect { to, stay } => {
            let answer = ask(to, Duration::from_secs(20));
            let found = FirstConnect {
                ok: answer.is_ok(),
                detail: answer.unwrap_or_else(|error| error.to_string()),
                ms: millis(begin.elapsed()),
            };
            say(&found)?;
            if stay {
                pause();
            }
        }
    }
    Ok(())
}

/// Waits for a signal; meanwhile takes leave of children that it inherits as the first process of a pod.
fn pause() {
    while check_interrupt().is_ok() {
        while nix::sys::wait::waitpid(None, Some(nix::sys::wait::WaitPidFlag::WNOHANG))
            .is_ok_and(|status| status != nix::sys::wait::WaitStatus::StillAlive)
        {}
        // Ends early by a signal.
        nix::unistd::sleep(5);
    }
}

fn listen(port: u16) -> anyhow::Result<TcpListener> {
    let both = TcpListener::bind(("::", port));
    both.or_else(|_| TcpListener::bind(("0.0.0.0", port)))
        .with_context(|| format!("listen on port {port}"))
}

fn serve(listener: &TcpListener) {
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                thread::spawn(move || answer(&stream, peer));
            }
            Err(error) => {
                eprintln!("accept: {error}");
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn answer(mut stream: &TcpStream, peer: SocketAddr) -> io::Result<()> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname")?;
    let name = name.trim_end();
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        let text = format!("{name} {} {}\n", peer.ip().to_canonical(), line.trim_end());
        if line.starts_with("GET ") {
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                text.len()
            );
            while lines.read_line(&mut line)? > 2 {}
            return stream.write_all((head + &text).as_bytes());
        }
        stream.write_all(text.as_bytes())?;
        line.clear();
    }
    Ok(())
}

/// A connection for one call.
fn ask(to: SocketAddr, timeout: Duration) -> io::Result<String> {
    let stream = connect(to, timeout)?;
    exchange(&mut BufReader::new(&stream))
}

fn connect(to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Asks over an open connection.
fn exchange(stream: &mut BufReader<&TcpStream>) -> io::Result<String> {
    stream.get_mut().write_all(b"hello\n")?;
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::Error::other("closed before an answer"));
    }
    Ok(line.trim_end().to_owned())
}

fn call_on(call: &Call) -> anyhow::Result<()> {
    let timeout = Duration::from_millis(call.timeout);
    let begin = Instant::now();
    let mut told = begin;
    let mut calls = Calls::default();
    let kept = if call.one_connection {
        Some(connect(call.to, timeout).context("make the one connection")?)
    } else {
        None
    };
    let mut kept = kept.as_ref().map(BufReader::new);
    while check_interrupt().is_ok()
        && call.count.is_none_or(|count| calls.calls < count)
        && call
            .seconds
            .is_none_or(|seconds| begin.elapsed() < Duration::from_secs(seconds))
    {
        let started = Instant::now();
        let outcome = match &mut kept {
            Some(stream) => exchange(stream),
            None => ask(call.to, timeout),
        };
        let lost = outcome.is_err() && kept.is_some();
        calls.note(outcome, started.elapsed());
        if lost {
            break;
        }
        if told.elapsed() >= Duration::from_secs(1) {
            told = Instant::now();
            say(&calls)?;
        }
        thread::sleep(Duration::from_millis(call.interval).saturating_sub(started.elapsed()));
    }
    say(&calls)?;
    if calls.failed > 0 {
        bail!("{} of {} calls failed", calls.failed, calls.calls);
    }
    Ok(())
}

impl Calls {
    fn note(&mut self, outcome: io::Result<String>, took: Duration) {
        self.calls += 1;
        match outcome {
            Ok(answer) => {
                self.ok += 1;
                let server = answer.split(' ').next().unwrap_or_default();
                *self.servers.entry(server.to_owned()).or_default() += 1;
                self.slowest_ms = self.slowest_ms.max(millis(took));
            }
            Err(error) => {
                self.failed += 1;
                *self.errors.entry(error.to_string()).or_default() += 1;
            }
        }
    }

    /// The last line of what `call` printed.
    pub fn last(printed: &str) -> anyhow::Result<Calls> {
        let line = printed.lines().rev().find(|line| line.starts_with('{'));
        serde_json::from_str(line.context("no calls were made yet")?).context("read how calls went")
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn say(what: &impl Serialize) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(what)?)
        .and_then(|()| out.flush())
        .context("print")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_server_and_by_error() {
        let mut calls = Calls::default();
        calls.note(Ok("web-0 10.0.0.1 hello".to_owned()), Duration::from_millis(3));
        calls.note(Ok("web-1 10.0.0.1 hello".to_owned()), Duration::from_millis(1));
        calls.note(Err(io::Error::other("reset")), Duration::ZERO);
        assert_eq!((calls.calls, calls.ok, calls.failed, calls.slowest_ms), (3, 2, 1, 3));
        assert_eq!((calls.servers["web-0"], calls.errors["reset"]), (1, 1));
        let printed = format!("{{}}\n{}\nnoise\n", serde_json::to_string(&calls).unwrap());
        assert_eq!(Calls::last(&printed).unwrap(), calls);
    }

    #[test]
    fn a_server_tells_who_answers_and_who_asks() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener));
        let answer = ask(to, Duration::from_secs(5)).unwrap();
        assert!(answer.ends_with(" 127.0.0.1 hello"), "{answer}");
    }
}
