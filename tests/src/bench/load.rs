//! The load: a server and clients, small and alike for plain TCP and Adit. They run in pods.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockRef, Socket, Type};

use crate::bed::Stage;
use crate::net::{listen, raise_open_files};

/// Swallows what comes and says how much it was.
const BULK: u16 = 5201;
/// Sends back what comes.
const PING: u16 = 5202;
/// Answers one byte and waits for the client's end.
pub(crate) const CONNECT: u16 = 5203;
/// Answers a few bytes and keeps the connection until it is told to drop all.
pub(crate) const HOLD: u16 = 5204;
/// Where nobody listens.
const NOBODY: u16 = 5205;

/// What a bulk stream writes and reads at once.
const BLOCK: usize = 128 << 10;
/// A ping and its answer.
const MESSAGE: usize = 64;
/// Bytes each way on a connection that is then idle.
const GREETING: usize = 8;
/// As a greeting: close all connections that are kept.
const DROP_ALL: [u8; GREETING] = *b"drop all";
/// More than the clients that connect at once.
const ACCEPTORS: usize = 24;
/// Threads that open connections to keep.
const OPENERS: usize = 8;
/// A stuck call is an error, not a slow one.
const STUCK: Duration = Duration::from_secs(5);
/// One of many attempts that are expected to fail.
const ATTEMPT: Duration = Duration::from_millis(100);
/// Between such attempts.
const PAUSE: Duration = Duration::from_millis(1);

/// Serves all kinds of load on every IPv4 address of the pod until it is killed.
pub(crate) fn serve(stage: &Stage) -> anyhow::Result<()> {
    raise_open_files()?;
    let [bulk, ping, connect, hold] = [BULK, PING, CONNECT, HOLD].map(|port| listen(("0.0.0.0", port)));
    let (bulk, ping, connect, hold) = (bulk?, ping?, Arc::new(connect?), Arc::new(hold?));
    thread::spawn(move || thread_each(&bulk, swallow));
    thread::spawn(move || thread_each(&ping, echo));
    for _ in 0..ACCEPTORS {
        let connect = connect.clone();
        thread::spawn(move || connect.incoming().flatten().for_each(answer_one));
    }
    let kept = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..OPENERS {
        let (hold, kept) = (hold.clone(), kept.clone());
        thread::spawn(move || hold.incoming().flatten().for_each(|stream| keep(stream, &kept)));
    }
    stage.reached(())?;
    stage.hold()
}

fn thread_each(listener: &TcpListener, work: fn(TcpStream) -> std::io::Result<()>) {
    for stream in listener.incoming().flatten() {
        // A client that is gone has told of it itself.
        thread::spawn(move || drop(work(stream)));
    }
}

fn swallow(mut stream: TcpStream) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK];
    stream.read_exact(&mut block[..1])?;
    stream.write_all(&[1])?;
    let mut total = 0_u64;
    loop {
        match stream.read(&mut block)? {
            0 => break,
            count => total += count as u64,
        }
    }
    stream.write_all(&total.to_le_bytes())
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut message = [0; MESSAGE];
    loop {
        stream.read_exact(&mut message)?;
        stream.write_all(&message)?;
    }
}

fn answer_one(mut stream: TcpStream) {
    let mut byte = [0];
    if stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {
        // The client closes first.
        let _ = stream.read(&mut byte);
    }
}

fn keep(mut stream: TcpStream, kept: &Mutex<Vec<TcpStream>>) {
    let mut greeting = [0; GREETING];
    if stream.read_exact(&mut greeting).is_err() || stream.write_all(&greeting).is_err() {
        return;
    }
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if greeting == DROP_ALL {
        kept.clear();
    } else {
        kept.push(stream);
    }
}

/// What a bulk transfer moved.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Bulk {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

impl Bulk {
    pub(crate) fn gbit_per_second(&self) -> f64 {
        self.bytes as f64 * 8.0 / 1e9 / self.seconds
    }
}

/// Writes on `streams` connections for so long; the time ends when the server has said that it has read all.
pub(crate) fn bulk(server: IpAddr, streams: usize, time: Duration) -> anyhow::Result<Bulk> {
    let barrier = Barrier::new(streams);
    let results = on_threads(streams, |_| {
        let opened = open(server, BULK).and_then(|mut stream| {
            // The path is there before the clock starts.
            stream.write_all(&[1])?;
            stream.read_exact(&mut [0])?;
            Ok(stream)
        });
        barrier.wait();
        let begin = Instant::now();
        let bytes = push(opened?, begin, time)?;
        Ok((bytes, begin, Instant::now()))
    })?;
    let begin = results.iter().map(|result| result.1).min().context("no stream")?;
    let end = results.iter().map(|result| result.2).max().context("no stream")?;
    Ok(Bulk {
        bytes: results.iter().map(|result| result.0).sum(),
        seconds: (end - begin).as_secs_f64(),
    })
}

fn push(mut stream: TcpStream, begin: Instant, time: Duration) -> anyhow::Result<u64> {
    let block = vec![0x5a; BLOCK];
    let mut sent = 0_u64;
    while begin.elapsed() < time {
        sent += stream.write(&block).context("write")? as u64;
    }
    stream.shutdown(Shutdown::Write).context("end the stream")?;
    let mut total = [0; 8];
    stream.read_exact(&mut total).context("read the server's total")?;
    let total = u64::from_le_bytes(total);
    ensure!(total == sent, "sent {sent} bytes, the server read {total}");
    Ok(sent)
}

/// How pings went.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Pings {
    pub(crate) per_second: f64,
    pub(crate) p50_us: f64,
}

/// Sends a message and waits for the answer, over and over, on each of `connections` at once.
pub(crate) fn ping(server: IpAddr, connections: usize, time: Duration) -> anyhow::Result<Pings> {
    let barrier = Barrier::new(connections);
    let results = on_threads(connections, |_| {
        let opened = open(server, PING).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            for _ in 0..20 {
                exchange(&mut stream)?;
            }
            Ok(stream)
        });
        barrier.wait();
        let (mut stream, begin) = (opened?, Instant::now());
        let mut times = Vec::with_capacity(64 << 10);
        let mut last = begin;
        while last - begin < time {
            exchange(&mut stream)?;
            let now = Instant::now();
            times.push(now - last);
            last = now;
        }
        Ok((times, begin, last))
    })?;
    let begin = results.iter().map(|result| result.1).min().context("no connection")?;
    let end = results.iter().map(|result| result.2).max().context("no connection")?;
    let mut times: Vec<Duration> = results.into_iter().flat_map(|result| result.0).collect();
    times.sort_unstable();
    Ok(Pings {
        per_second: times.len() as f64 / (end - begin).as_secs_f64(),
        p50_us: times[times.len() / 2].as_secs_f64() * 1e6,
    })
}

/// Pings on one connection while a bulk stream of the same pods runs on another.
pub(crate) fn ping_beside_bulk(server: IpAddr, time: Duration) -> anyhow::Result<Pings> {
    const LEAD: Duration = Duration::from_millis(100);
    thread::scope(|scope| {
        let stream = scope.spawn(|| bulk(server, 1, time + 3 * LEAD));
        thread::sleep(LEAD);
        let pings = ping(server, 1, time);
        stream
            .join()
            .map_err(|_| anyhow::anyhow!("the bulk stream's thread panicked"))??;
        pings
    })
}

fn exchange(stream: &mut TcpStream) -> anyhow::Result<()> {
    let mut message = [0x5a; MESSAGE];
    stream.write_all(&message).context("send a ping")?;
    stream.read_exact(&mut message).context("read the answer to a ping")
}

/// How connecting over and over went.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Connects {
    pub(crate) done: u64,
    pub(crate) per_second: f64,
    pub(crate) errors: u64,
    pub(crate) error: Option<String>,
}

/// Connects, sends a byte, reads a byte and closes, over and over, on each of `threads` at once.
pub(crate) fn connects(server: IpAddr, threads: usize, time: Duration) -> anyhow::Result<Connects> {
    let begin = Instant::now();
    let results = on_threads(threads, |_| {
        let (mut done, mut errors, mut first) = (0_u64, 0_u64, None);
        while begin.elapsed() < time {
            match connect_once(server) {
                Ok(()) => done += 1,
                Err(error) => {
                    errors += 1;
                    first.get_or_insert(format!("{error:#}"));
                }
            }
        }
        Ok((done, errors, first))
    })?;
    let seconds = begin.elapsed().as_secs_f64();
    let done: u64 = results.iter().map(|result| result.0).sum();
    let errors = results.iter().map(|result| result.1).sum();
    let error = results.into_iter().find_map(|result| result.2);
    if done == 0 {
        bail!("no connection succeeded: {}", error.unwrap_or_default());
    }
    Ok(Connects {
        done,
        per_second: done as f64 / seconds,
        errors,
        error,
    })
}

/// The time of the call of `connect` to a port that nobody listens on, over and over, in nanoseconds: that which one call
/// in ten stays below, because what disturbs a call only makes it longer.
pub(crate) fn refused(server: IpAddr, time: Duration) -> anyhow::Result<f64> {
    stay_on_one_cpu()?;
    let server = SocketAddr::from((server, NOBODY)).into();
    let end = Instant::now() + time;
    let mut times = Vec::with_capacity(64 << 10);
    loop {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_linger(Some(Duration::ZERO))?;
        let begin = Instant::now();
        let outcome = socket.connect(&server);
        let now = Instant::now();
        times.push(now - begin);
        match outcome {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            // Where a proxy accepts for the server, it is the proxy that is refused, later.
            Ok(()) => {}
            Err(error) => return Err(error).context("connect to be refused"),
        }
        if now > end {
            break;
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 10].as_secs_f64() * 1e9)
}

/// CPUs differ, by what else they are given to do.
fn stay_on_one_cpu() -> anyhow::Result<()> {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this)?;
    let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(first.context("no CPU to run on")?)?;
    sched_setaffinity(this, &one).context("stay on one CPU")
}

/// The time in milliseconds from `connect` to the answer to one byte.
pub(crate) fn first_answer(server: IpAddr) -> anyhow::Result<f64> {
    let begin = Instant::now();
    connect_once(server)?;
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

/// Tells the bench whether the server answers at first, and then tries until it does, at most so long. An attempt that
/// hangs counts as refused.
pub(crate) fn until_answered(stage: &Stage, server: IpAddr, limit: Duration) -> anyhow::Result<()> {
    stage.reached(is_answered(server))?;
    let begin = Instant::now();
    while !is_answered(server) {
        ensure!(
            begin.elapsed() < limit,
            "{server} still does not answer after {limit:?}"
        );
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Whether the server answers one byte, on a fresh connection and soon.
pub(crate) fn is_answered(server: IpAddr) -> bool {
    TcpStream::connect_timeout(&SocketAddr::from((server, CONNECT)), ATTEMPT)
        .and_then(|stream| stream.set_read_timeout(Some(ATTEMPT)).map(|()| stream))
        .is_ok_and(|stream| one_byte(stream).is_ok())
}

fn connect_once(server: IpAddr) -> anyhow::Result<()> {
    one_byte(open(server, CONNECT)?)
}

fn one_byte(mut stream: TcpStream) -> anyhow::Result<()> {
    // Closing by reset leaves no TIME_WAIT, of which plain TCP would gather more than there are ports.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    stream.write_all(&[1]).context("send a byte")?;
    stream.read_exact(&mut [0]).context("read the answer")
}

/// Opens `count` connections, moves a few bytes on each and keeps them until the bench lets it proceed.
pub(crate) fn hold(stage: &Stage, server: IpAddr, count: usize) -> anyhow::Result<()> {
    let streams = open_to_keep(stage, server, count)?;
    stage.hold()?;
    drop(streams);
    greet(server, DROP_ALL).map(drop)
}

/// Opens `count` connections as [`hold`] does, and waits until somebody else has ended each of them, at most so long.
/// Gives how many are still open.
pub(crate) fn hold_until_ended(stage: &Stage, server: IpAddr, count: usize, limit: Duration) -> anyhow::Result<usize> {
    let shares = open_to_keep(stage, server, count)?;
    let deadline = Instant::now() + limit;
    // All have to end, so it does not matter in which order a thread looks at its own.
    let open = on_threads(OPENERS, |index| {
        let ended = shares[index].iter().map(|stream| is_ended_by(stream, deadline));
        ended
            .map(|ended| Ok(usize::from(!ended?)))
            .sum::<anyhow::Result<usize>>()
    })?;
    Ok(open.into_iter().sum())
}

/// Tells the bench of the connections, by the thread that opened them.
fn open_to_keep(stage: &Stage, server: IpAddr, count: usize) -> anyhow::Result<Vec<Vec<TcpStream>>> {
    raise_open_files()?;
    let streams = on_threads(OPENERS, |index| {
        let share = count / OPENERS + usize::from(index < count % OPENERS);
        (0..share)
            .map(|_| greet(server, *b"and keep"))
            .collect::<anyhow::Result<Vec<_>>>()
    })?;
    stage.reached(streams.iter().map(Vec::len).sum::<usize>())?;
    Ok(streams)
}

/// Whether the connection, on which nothing comes any more, ends by then.
fn is_ended_by(mut stream: &TcpStream, deadline: Instant) -> anyhow::Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    // A timeout of zero would be none.
    stream.set_read_timeout(Some(left.max(PAUSE)))?;
    match stream.read(&mut [0]) {
        Ok(0) => Ok(true),
        Ok(_) => bail!("the server sent more than its greeting"),
        Err(error) => Ok(!matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)),
    }
}

/// Whether the server greets on a fresh connection.
pub(crate) fn is_greeted(server: IpAddr) -> bool {
    greet(server, *b"and keep").is_ok()
}

fn greet(server: IpAddr, greeting: [u8; GREETING]) -> anyhow::Result<TcpStream> {
    let mut stream = open(server, HOLD)?;
    stream.write_all(&greeting)?;
    stream
        .read_exact(&mut [0; GREETING])
        .context("read the greeting back")?;
    Ok(stream)
}

fn open(server: IpAddr, port: u16) -> anyhow::Result<TcpStream> {
    let server = SocketAddr::from((server, port));
    let stream = TcpStream::connect(server).with_context(|| format!("connect to {server}"))?;
    stream.set_read_timeout(Some(STUCK))?;
    stream.set_write_timeout(Some(STUCK))?;
    Ok(stream)
}

/// Runs `work` on so many threads at once and gives all results, or the first error.
fn on_threads<T: Send>(count: usize, work: impl Fn(usize) -> anyhow::Result<T> + Sync) -> anyhow::Result<Vec<T>> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..count).map(|index| scope.spawn(move || work(index))).collect();
        let results = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("a thread of the load panicked"),
        });
        results.collect()
    })
}
