//! From one `adit node` to the next on the same node: they talk over a socket in the folder that both are told.
//!
//! The one that starts asks the one in charge to keep still ("freeze"), puts its own programs and listeners in place, and
//! then tells it to go ("drain"). Until that word, the end of the connection means that the newcomer has failed: the one
//! in charge takes back what may have been taken, and stays.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

/// How long the other process may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long to wait for another process that is starting, too.
const TURN: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// The socket's name in the folder.
const SOCKET: &str = "control.sock";
/// What a process that has been told to stop adds to its name.
const LEAVING: &str = ", leaving";
/// The name of the file that is locked by who starts.
const LOCK: &str = "start.lock";

/// The right to start, held by one process at a time.
pub(super) struct Turn {
    _lock: Flock<File>,
}

impl Turn {
    /// Waits for the right to start. The folder is made where it is missing.
    pub(super) async fn wait(dir: &Path) -> anyhow::Result<Self> {
        let at = |doing: &str, path: &Path| format!("{doing} {}; --run-dir names another folder", path.display());
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .with_context(|| at("making the folder", dir))?;
        let path = dir.join(LOCK);
        let deadline = Instant::now() + TURN;
        let mut file = File::create(&path).with_context(|| at("making", &path))?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self { _lock: lock }),
                Err((back, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() < deadline => file = back,
                Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                    bail!("another adit node has been starting for {} s", TURN.as_secs())
                }
                Err((_, error)) => return Err(error).with_context(|| at("locking", &path)),
            }
            sleep(POLL).await;
        }
    }
}

/// The process in charge, as its successor sees it.
pub(super) struct Predecessor {
    stream: BufReader<UnixStream>,
    /// Its process id and version.
    pub(super) name: String,
    /// Whether it has been told to stop, and only waits for a successor or for the end of what it carries.
    pub(super) leaving: bool,
}

impl Predecessor {
    /// Looks for a process in charge.
    pub(super) async fn find(dir: &Path) -> anyhow::Result<Option<Self>> {
        let path = dir.join(SOCKET);
        let stream = match UnixStream::connect(&path).await {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(error) => return Err(error).with_context(|| format!("connecting to {}", path.display())),
        };
        let mut found = Self {
            stream: BufReader::new(stream),
            name: "the running proxy".to_owned(),
            leaving: false,
        };
        let said = found.ask("hello").await?;
        let name = said.strip_suffix(LEAVING);
        found.leaving = name.is_some();
        found.name = format!("the running proxy ({})", name.unwrap_or(&said));
        Ok(Some(found))
    }

    /// Asks it to change nothing any more.
    pub(super) async fn freeze(&mut self) -> anyhow::Result<()> {
        self.ask("freeze").await.map(drop)
    }

    /// Tells it to go: from here on this process is in charge.
    pub(super) async fn drain(mut self) -> anyhow::Result<()> {
        self.ask("drain").await.map(drop)
    }

    async fn ask(&mut self, word: &str) -> anyhow::Result<String> {
        let exchange = async {
            self.stream.get_mut().write_all(format!("{word}\n").as_bytes()).await?;
            let mut answer = String::new();
            self.stream.read_line(&mut answer).await?;
            io::Result::Ok(answer)
        };
        let answer = timeout(ANSWER, exchange)
            .await
            .map_err(io::Error::from)
            .flatten()
            .with_context(|| format!("asking {} to {word}; it stays in charge", self.name))?;
        match answer.trim_end().split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_owned()),
            _ => bail!("{} does not {word} but says {answer:?}; it stays in charge", self.name),
        }
    }
}

/// What a successor wants of the process in charge.
#[derive(Debug)]
pub(super) enum Wish {
    /// To change nothing; answered once nothing changes.
    Freeze(oneshot::Sender<()>),
    /// To go on as before: the successor has failed.
    Thaw,
    /// To leave; answered once the admin page's address is free.
    Drain(oneshot::Sender<()>),
}

/// Where successors are heard.
pub(super) struct Control {
    listener: UnixListener,
    standing: Arc<Standing>,
}

/// How this process stands to those that may follow it.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// It has been told to stop.
    leaving: AtomicBool,
    /// It changes nothing, as a successor has asked.
    frozen: AtomicBool,
    /// A successor is talking to it.
    heard: watch::Sender<bool>,
}

impl Standing {
    pub(super) fn tell_to_stop(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_told_to_stop(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// Waits until no successor is talking, and for so long at most.
    pub(super) async fn unheard(&self) {
        let mut heard = self.heard.subscribe();
        let _ = timeout(TURN, heard.wait_for(|heard| !heard)).await;
    }
}

impl Control {
    /// Listens in the folder, in the place of whoever did before.
    pub(super) fn bind(dir: &Path, standing: Arc<Standing>) -> anyhow::Result<Self> {
        let path: PathBuf = dir.join(SOCKET);
        let bind = || {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(&path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            Ok(listener)
        };
        let listener = bind().with_context(|| format!("listening on {}", path.display()))?;
        Ok(Self { listener, standing })
    }

    /// Hears successors, one after the other, until one has said the last word.
    pub(super) async fn serve(self, wishes: mpsc::Sender<Wish>) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    // Root only, as its folder and mode say; a second lock does not hurt.
                    let own = nix::unistd::geteuid().as_raw();
                    if stream.peer_cred().is_ok_and(|peer| peer.uid() == own) {
                        self.standing.heard.send_replace(true);
                        let last = converse(stream, &wishes, &self.standing).await;
                        self.standing.heard.send_replace(false);
                        if last {
                            return;
                        }
                        self.standing.frozen.store(false, Ordering::Relaxed);
                    }
                }
                Err(error) => {
                    tracing::warn!("hearing a successor: {error}");
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

/// Returns whether the last word was said.
async fn converse(stream: UnixStream, wishes: &mpsc::Sender<Wish>, standing: &Standing) -> bool {
    let mut stream = BufReader::new(stream);
    loop {
        let mut word = String::new();
        let heard = stream.read_line(&mut word).await;
        let (done, answer) = oneshot::channel();
        let reply = match (heard, word.trim_end()) {
            (Ok(1..), "hello") => {
                let leaving = if standing.is_told_to_stop() { LEAVING } else { "" };
                format!("ok pid {}, {}{leaving}\n", std::process::id(), super::version())
            }
            (Ok(1..), "freeze") => {
                standing.frozen.store(true, Ordering::Relaxed);
                if wishes.send(Wish::Freeze(done)).await.is_err() || answer.await.is_err() {
                    return true;
                }
                "ok frozen\n".to_owned()
            }
            (Ok(1..), "drain") if standing.is_frozen() => {
                if wishes.send(Wish::Drain(done)).await.is_ok() && answer.await.is_ok() {
                    // The successor knows by its own means whether the address is free.
                    let _ = stream.get_mut().write_all(b"ok draining\n").await;
                }
                return true;
            }
            _ => {
                if standing.is_frozen() {
                    let _ = wishes.send(Wish::Thaw).await;
                }
                return false;
            }
        };
        if stream.get_mut().write_all(reply.as_bytes()).await.is_err() {
            if standing.is_frozen() {
                let _ = wishes.send(Wish::Thaw).await;
            }
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_successor_that_goes_away_thaws_and_one_that_says_the_last_word_is_the_last() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Predecessor::find(dir.path()).await.unwrap().is_none());
        let (sender, mut wishes) = mpsc::channel(1);
        let standing = Arc::new(Standing::default());
        let serving = tokio::spawn(Control::bind(dir.path(), Arc::clone(&standing)).unwrap().serve(sender));

        let mut failing = Predecessor::find(dir.path()).await.unwrap().unwrap();
        assert!(failing.name.contains("pid") && !failing.leaving, "{}", failing.name);
        let (frozen, wish) = tokio::join!(failing.freeze(), async {
            match wishes.recv().await {
                Some(Wish::Freeze(done)) => done.send(()).unwrap(),
                other => panic!("{other:?}"),
            }
        });
        frozen.unwrap();
        let () = wish;
        drop(failing);
        assert!(matches!(wishes.recv().await, Some(Wish::Thaw)));

        standing.unheard().await;
        assert!(!standing.is_frozen());
        standing.tell_to_stop();
        let mut next = Predecessor::find(dir.path()).await.unwrap().unwrap();
        assert!(next.leaving && !next.name.contains("leaving"), "{}", next.name);
        let told = tokio::spawn(async move {
            next.freeze().await.unwrap();
            next.drain().await.unwrap();
        });
        for _ in 0..2 {
            match wishes.recv().await {
                Some(Wish::Freeze(done) | Wish::Drain(done)) => done.send(()).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        told.await.unwrap();
        serving.await.unwrap();
        assert!(
            Predecessor::find(dir.path()).await.unwrap().is_none(),
            "nobody listens any more"
        );
    }

    #[tokio::test]
    async fn one_process_starts_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = Turn::wait(&dir.path().join("run")).await.unwrap();
        let second = tokio::spawn({
            let dir = dir.path().join("run");
            async move { Turn::wait(&dir).await.map(drop) }
        });
        sleep(POLL * 3).await;
        assert!(!second.is_finished());
        drop(first);
        second.await.unwrap().unwrap();
    }
}
