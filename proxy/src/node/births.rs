//! The births of pods: new cgroups, first processes, and connects in namespaces that nobody has looked at.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::sync::Notify;

use super::classify::{Classifier, ClassifyError, LOGGED};
use crate::mesh::MeshHandle;
use crate::steer::{Namespaces, Startup, Strangers};

/// When a cgroup with new processes is looked at again, after the last look: a process may be in its cgroup before it is
/// in its network namespace.
const AGAIN: [Duration; 6] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(20),
    Duration::from_millis(100),
    Duration::from_millis(400),
    Duration::from_millis(1500),
];
/// How long after connects in unknown namespaces more of them are gathered: a pod must not keep this busy.
const GATHER: Duration = Duration::from_millis(5);
/// How often everything is looked at, and what is gone forgotten.
const SWEEP: Duration = Duration::from_secs(30);

/// The watch over the births of pods.
pub struct Births {
    classifier: Classifier,
    inotify: Inotify,
    namespaces: Namespaces,
    /// There once nobody else reads them.
    strangers: Option<Strangers>,
    /// Until when these are gathered.
    gathering: Instant,
    /// The cgroups that are watched.
    watched: HashMap<WatchDescriptor, PathBuf>,
    /// They too, by their ids.
    by_id: HashMap<u64, PathBuf>,
    /// The cgroups that are to be looked at again: when, and how often that was done.
    again: HashMap<PathBuf, (Instant, usize)>,
    /// The namespaces that the last sweep has seen.
    seen: HashSet<u64>,
    /// Whose refused connects were logged.
    logged: HashSet<u64>,
}

impl Births {
    /// Begins to watch the cgroups below `pods_cgroup`, and looks at all that are there. `born` is woken when a pod of
    /// `node` that the mesh wants enrolled is there and is not.
    pub fn watch(
        pods_cgroup: &Path,
        namespaces: &Namespaces,
        node: &str,
        mesh: MeshHandle,
        born: Arc<Notify>,
    ) -> Result<Self, ClassifyError> {
        let failed = |error: Errno| ClassifyError::Watch {
            path: pods_cgroup.to_owned(),
            error: error.into(),
        };
        let mut births = Self {
            classifier: Classifier::new(pods_cgroup, namespaces.clone(), node, mesh, born)?,
            inotify: Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(failed)?,
            namespaces: namespaces.clone(),
            strangers: None,
            gathering: Instant::now(),
            watched: HashMap::new(),
            by_id: HashMap::new(),
            again: HashMap::new(),
            seen: HashSet::new(),
            logged: HashSet::new(),
        };
        births.sweep()?;
        Ok(births)
    }

    /// Goes on watching, on a thread of its own, until that is stopped. To be called within a tokio runtime.
    pub fn follow(mut self) -> Result<BirthWatch, ClassifyError> {
        let failed = |error| ClassifyError::Watch {
            path: self.classifier.root.clone(),
            error,
        };
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let changed = mesh_changes(&self.classifier.mesh()).map_err(failed)?;
        self.strangers = Some(self.namespaces.strangers()?);
        let root = self.classifier.root.clone();
        let work = move || {
            let mut next_sweep = Instant::now() + SWEEP;
            loop {
                let now = Instant::now();
                let worked = if now >= next_sweep {
                    next_sweep = now + SWEEP;
                    self.sweep().map(|()| true)
                } else {
                    self.step(next_sweep, &stopped, &changed)
                };
                match worked {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => {
                        tracing::error!("{error}; pods that are born are classified later, and refused until then");
                        thread::sleep(Duration::from_secs(1));
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("births".to_owned()).spawn(work);
        let thread = thread.map_err(|error| ClassifyError::Watch { path: root, error })?;
        Ok(BirthWatch { stop, thread })
    }

    /// Waits for something to happen, at most until then, and looks at what it is about. False where it is told to stop.
    fn step(&mut self, until: Instant, stopped: &UnixStream, changed: &UnixStream) -> Result<bool, ClassifyError> {
        let mut next = self.again.values().map(|(when, _)| *when).fold(until, Instant::min);
        let mut for_strangers = PollFlags::POLLIN;
        if self.gathering > Instant::now() {
            next = next.min(self.gathering);
            for_strangers = PollFlags::empty();
        }
        // Rounded up, so that what is due is due when it is woken.
        let wait = next.saturating_duration_since(Instant::now()).as_millis() + 1;
        let timeout = PollTimeout::try_from(wait.min(60_000) as i32).unwrap_or(PollTimeout::MAX);
        let Some(strangers) = &self.strangers else {
            return Ok(false);
        };
        let [events, strangers, stop, news] = {
            let mut ready = [
                PollFd::new(self.inotify.as_fd(), PollFlags::POLLIN),
                PollFd::new(strangers.as_fd(), for_strangers),
                PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
                PollFd::new(changed.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ready, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(self.failed(error)),
            }
            ready.map(|fd| fd.any().unwrap_or(true))
        };
        if stop {
            return Ok(false);
        }
        let mut touched = HashSet::new();
        if news {
            drain(changed);
            let waiting = self.classifier.take_waiting();
            self.classifier.look(&waiting)?;
        }
        if events {
            self.take_events(&mut touched)?;
        }
        if strangers {
            self.take_strangers(&mut touched);
            self.gathering = Instant::now() + GATHER;
        }
        let now = Instant::now();
        for cgroup in &touched {
            self.again.insert(cgroup.clone(), (now + AGAIN[0], 0));
        }
        for (cgroup, (when, times)) in &mut self.again {
            if *when <= now {
                touched.insert(cgroup.clone());
                *times += 1;
                *when = now + AGAIN.get(*times).copied().unwrap_or_default();
            }
        }
        self.again.retain(|_, (_, times)| *times < AGAIN.len());
        if !touched.is_empty() {
            self.classifier.look(&touched)?;
        }
        if self.classifier.is_full() {
            self.sweep()?;
        }
        Ok(true)
    }

    /// Learns which cgroups have got processes, or are new.
    fn take_events(&mut self, touched: &mut HashSet<PathBuf>) -> Result<(), ClassifyError> {
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(error) => return Err(self.failed(error)),
            };
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    touched.extend(self.watch_tree());
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.watched.remove(&event.wd);
                } else if let Some(cgroup) = self.watched.get(&event.wd).cloned() {
                    let name = event.name.as_deref().map(|name| name.to_string_lossy());
                    match name.as_deref() {
                        Some(name) if event.mask.contains(AddWatchFlags::IN_CREATE) => {
                            let mut new = Vec::new();
                            self.watch_below(cgroup.join(name), &mut new);
                            touched.extend(new);
                        }
                        // The file itself is watched too: who changes it in the kernel is not told of otherwise.
                        None | Some("cgroup.procs" | "cgroup.threads" | "cgroup.events") => {
                            touched.insert(cgroup);
                        }
                        Some(_) => {}
                    }
                }
            }
        }
    }

    /// Learns in which cgroups somebody has connected in a namespace that nobody has looked at.
    fn take_strangers(&mut self, touched: &mut HashSet<PathBuf>) {
        while let Some(stranger) = self.strangers.as_mut().and_then(Strangers::take) {
            if self.logged.len() < LOGGED && self.logged.insert(stranger.netns) {
                let refused = stranger.startup == Startup::Enforced as u32;
                tracing::info!(
                    "a connect of process {} was {}: nobody had looked at its network namespace yet",
                    stranger.pid,
                    if refused { "refused" } else { "let through" }
                );
            }
            match self.by_id.get(&stranger.cgroup) {
                Some(cgroup) => touched.extend([cgroup.clone()]),
                None => touched.extend(self.watch_tree()),
            }
        }
    }

    /// Looks at everything, and forgets what is gone.
    fn sweep(&mut self) -> Result<(), ClassifyError> {
        // Of a cgroup that is removed the kernel tells nothing (Linux 6.18), and keeps its watches until they are removed.
        let before = std::mem::take(&mut self.watched);
        self.by_id.clear();
        let all = self.watch_tree();
        for descriptor in before.into_keys().filter(|known| !self.watched.contains_key(known)) {
            // Fails only where it has gone by itself.
            let _ = self.inotify.rm_watch(descriptor);
        }
        let seen = self.classifier.look(&all)?;
        self.classifier.forget(&seen, &self.seen)?;
        self.logged.retain(|cookie| seen.contains(cookie));
        self.seen = seen;
        Ok(())
    }

    /// Watches every cgroup that is not watched yet, and gives all.
    fn watch_tree(&mut self) -> Vec<PathBuf> {
        let mut all = Vec::new();
        self.watch_below(self.classifier.root.clone(), &mut all);
        all
    }

    /// Watches a cgroup and those below it, and adds them to `all`. The watch is there before it is looked what is.
    fn watch_below(&mut self, cgroup: PathBuf, all: &mut Vec<PathBuf>) {
        let folder = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ONLYDIR;
        let watches = [
            self.inotify.add_watch(&cgroup, folder),
            self.inotify
                .add_watch(&cgroup.join("cgroup.events"), AddWatchFlags::IN_MODIFY),
        ];
        for watch in watches {
            match watch {
                Ok(descriptor) => {
                    self.watched.insert(descriptor, cgroup.clone());
                }
                // Gone again; and the root of the hierarchy has no such file.
                Err(Errno::ENOENT | Errno::ENOTDIR) => {}
                Err(error) => tracing::warn!("watching {}: {error}; its births are seen later", cgroup.display()),
            }
        }
        if let Ok(metadata) = fs::metadata(&cgroup) {
            self.by_id.insert(metadata.ino(), cgroup.clone());
        }
        for entry in fs::read_dir(&cgroup).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.watch_below(entry.path(), all);
            }
        }
        all.push(cgroup);
    }

    fn failed(&self, error: Errno) -> ClassifyError {
        ClassifyError::Watch {
            path: self.classifier.root.clone(),
            error: error.into(),
        }
    }
}

/// A stream that is readable when the mesh has changed since it was last read.
fn mesh_changes(mesh: &MeshHandle) -> io::Result<UnixStream> {
    let (changed, tell) = UnixStream::pair()?;
    changed.set_nonblocking(true)?;
    tell.set_nonblocking(true)?;
    let mut generations = mesh.subscribe();
    tokio::spawn(async move {
        while generations.changed().await.is_ok() {
            match (&tell).write(&[0]) {
                Ok(_) => {}
                // It has been told often enough.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Nobody follows births here any more.
                Err(_) => return,
            }
        }
    });
    Ok(changed)
}

fn drain(mut stream: &UnixStream) {
    let mut bytes = [0; 64];
    while stream.read(&mut bytes).is_ok_and(|len| len > 0) {}
}

/// The thread that follows births; it ends when this is dropped.
pub struct BirthWatch {
    stop: UnixStream,
    thread: JoinHandle<()>,
}

impl BirthWatch {
    /// Ends it, and waits until it has ended: another process is to follow births from now on.
    pub fn stop(self) {
        drop(self.stop);
        // One that has panicked has ended too.
        let _ = self.thread.join();
    }
}
