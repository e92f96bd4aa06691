//! The threads that carry connections.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

use super::accept::{Listener, accept_all};
use super::standing::Standing;
use super::{Dataplane, inbound, outbound};
use crate::hbone::{HboneSettings, Pool};
use crate::node::{LocalPod, PodListeners, PodServer};

/// How long tunnels may take to send what they hold, once all connections have ended.
const FLUSH: Duration = Duration::from_secs(1);
const FLUSH_POLL: Duration = Duration::from_millis(2);

/// What a worker's connections share.
pub(super) struct Worker {
    pub(super) plane: Arc<Dataplane>,
    pub(super) pool: Rc<Pool>,
    pub(super) hbone: Rc<HboneSettings>,
    pub(super) rng: RefCell<fastrand::Rng>,
    pub(super) standing: Standing,
}

enum Command {
    Add(Arc<LocalPod>, PodListeners),
    /// Serve these listeners instead.
    Listen(Arc<LocalPod>, PodListeners),
    Remove(Arc<str>),
    /// End; first, if so, let tunnels send what they hold.
    Stop {
        flush: bool,
    },
}

/// The workers.
pub struct Workers {
    plane: Arc<Dataplane>,
    commands: Vec<mpsc::UnboundedSender<Command>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// Starts `count` workers.
    pub fn start(plane: &Arc<Dataplane>, count: usize) -> io::Result<Self> {
        let mut workers = Self {
            plane: Arc::clone(plane),
            commands: Vec::new(),
            threads: Mutex::default(),
        };
        for number in 0..count {
            let (commands, received) = mpsc::unbounded_channel();
            let plane = Arc::clone(plane);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let thread = thread::Builder::new()
                .name(format!("adit-worker-{number}"))
                .spawn(move || LocalSet::new().block_on(&runtime, run(plane, received)))?;
            workers.commands.push(commands);
            workers
                .threads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(thread);
        }
        Ok(workers)
    }

    /// Ends the workers' connections, each with a reset, and waits for the threads. With `flush`, which is for a drain
    /// that has come to its end, tunnels first get a moment to send what they still hold of streams that have ended.
    pub fn stop(&self, flush: bool) {
        for worker in &self.commands {
            // One that has ended has stopped.
            let _ = worker.send(Command::Stop { flush });
        }
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker has panicked");
            }
        }
    }
}

impl PodServer for Workers {
    fn added(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>) {
        for (worker, listeners) in self.commands.iter().zip(listeners) {
            if worker.send(Command::Add(Arc::clone(pod), listeners)).is_err() {
                tracing::error!("a worker has ended; pod {} is not served", pod.uid());
            }
        }
    }

    fn listening(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>) {
        for (worker, listeners) in self.commands.iter().zip(listeners) {
            // A worker that has ended serves nothing any more.
            let _ = worker.send(Command::Listen(Arc::clone(pod), listeners));
        }
    }

    fn take_broken(&self) -> HashSet<Arc<str>> {
        std::mem::take(&mut self.plane.broken.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn removed(&self, uid: &str) {
        for worker in &self.commands {
            // A worker that has ended serves nothing any more.
            let _ = worker.send(Command::Remove(uid.into()));
        }
    }
}

async fn run(plane: Arc<Dataplane>, mut commands: mpsc::UnboundedReceiver<Command>) {
    let worker = Rc::new(Worker {
        hbone: Rc::new(plane.settings.hbone.clone()),
        plane,
        pool: Rc::default(),
        rng: RefCell::new(fastrand::Rng::new()),
        standing: Standing::default(),
    });
    let mut pods: HashMap<Arc<str>, Served> = HashMap::new();
    let mut generations = worker.plane.mesh.subscribe();
    let mut draining = worker.plane.draining.clone();
    let mut drained = false;
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Add(pod, listeners)) => {
                    let mut served = Served::default();
                    if let Err(error) = served.serve(&worker, &pod, listeners) {
                        tracing::error!("pod {} is not served: {error}", pod.uid());
                    }
                    pods.insert(Arc::clone(pod.uid()), served);
                }
                Some(Command::Listen(pod, listeners)) => {
                    let served = pods.entry(Arc::clone(pod.uid())).or_default();
                    if let Err(error) = served.serve(&worker, &pod, listeners) {
                        tracing::error!("pod {} is not served: {error}", pod.uid());
                    }
                }
                Some(Command::Remove(uid)) => {
                    pods.remove(&uid);
                    worker.pool.forget_source(&uid);
                }
                Some(Command::Stop { flush: true }) => {
                    // Too long a goodbye is cut short.
                    let _ = timeout(FLUSH, flush(&worker, &mut pods)).await;
                    return;
                }
                Some(Command::Stop { flush: false }) | None => return,
            },
            Ok(()) = generations.changed() => {
                let mesh = worker.plane.mesh.load();
                worker.pool.retain_destinations(|uid| mesh.workload_by_uid(uid).is_some());
                worker.standing.review(&mesh).await;
            }
            Ok(_) = draining.wait_for(|draining| *draining), if !drained => {
                drained = true;
                worker.pool.retire_all();
            }
        }
    }
}

/// Waits for the tunnels to end: the servers' with the pods' tasks, the clients' as they let go of the settings.
async fn flush(worker: &Worker, pods: &mut HashMap<Arc<str>, Served>) {
    worker.pool.retire_all();
    for served in pods.values_mut() {
        while served.tasks.join_next().await.is_some() {}
    }
    while Rc::strong_count(&worker.hbone) > 1 {
        sleep(FLUSH_POLL).await;
    }
}

/// What a worker does for one pod.
#[derive(Default)]
struct Served {
    tasks: JoinSet<()>,
    /// Says that the listeners have been replaced.
    replaced: watch::Sender<bool>,
}

impl Served {
    /// Serves these listeners, and no others any more. What has come through those goes on.
    fn serve(&mut self, worker: &Rc<Worker>, pod: &Arc<LocalPod>, listeners: PodListeners) -> io::Result<()> {
        self.replaced.send_replace(true);
        self.replaced = watch::Sender::new(false);
        // What has ended by itself.
        while self.tasks.try_join_next().is_some() {}
        let listener = |listener: std::net::TcpListener| {
            let replaced = self.replaced.subscribe();
            TcpListener::from_std(listener).map(|listener| Listener { listener, replaced })
        };
        let (outbound, hbone) = (listener(listeners.outbound)?, listener(listeners.hbone)?);
        let plaintext = listener(listeners.plaintext)?;
        let (w, p) = (Rc::clone(worker), Arc::clone(pod));
        self.tasks.spawn_local(accept_all(w, p, outbound, outbound::serve));
        let (w, p) = (Rc::clone(worker), Arc::clone(pod));
        self.tasks.spawn_local(accept_all(w, p, hbone, inbound::serve_tunnel));
        let (w, p) = (Rc::clone(worker), Arc::clone(pod));
        self.tasks
            .spawn_local(accept_all(w, p, plaintext, inbound::serve_plaintext));
        Ok(())
    }
}
