//! The client, as Python sees it.
//!
//! Invariants:
//! - A method checks its arguments before any transfer begins, and raises for those only. Whatever
//!   the store does afterwards is a result: a miss, or a page that was not stored.
//! - Every method that waits has one timeout.

use crate::calls::{Completions, deadline, run, seconds};
use crate::fork::{PerProcess, start_error};
use crate::memory::{Buffer, Memory, Target};
use crate::namespace::{Namespace, invalid, key, keys};
use crate::owner::ReturnAtEnd;
use bytes::Bytes;
use larder_bindings::{Holds, Session, check_distinct, new_pages, targets_of_parts};
use larder_client::{
    ClientOptions, FollowEnd, Forgotten, GetOptions, Hint, Lease, PinKind, Pinned, PutOptions, PutOutcome, StoreUrl,
    Tier,
};
use larder_format::{PageGeometry, PageKey};
use larder_runtime::lock::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::sync::Arc;
use std::time::Duration;

/// Maximum length of a [`Buffer`] in bytes.
const BUFFER_BYTES_MAX: usize = 1 << 30;

type PageTarget = larder_bindings::PageTarget<Target>;
type Queue<'a, 'py> = Option<&'a Bound<'py, Completions>>;

/// A store client of one namespace.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Client {
    geometry: PageGeometry,
    session: Mutex<Session>,
}

impl Client {
    /// The client of this process. A forked child attaches anew.
    fn attached(&self) -> PyResult<larder_client::Client> {
        self.session.lock().attached().map_err(start_error)
    }

    fn geometry(&self) -> &PageGeometry {
        &self.geometry
    }

    /// Memory of a page: one run of bytes, or one per part.
    fn memory(&self, object: &Bound<'_, PyAny>) -> PyResult<PageMemory> {
        if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
            let parts = object.try_iter()?.map(|part| Memory::of(&part?)).collect::<PyResult<Vec<_>>>()?;
            let expected = self.geometry().part_count();
            if parts.len() != expected {
                return Err(PyValueError::new_err(format!(
                    "{} buffers for the {expected} parts of a page",
                    parts.len()
                )));
            }
            return Ok(PageMemory::Parts(parts));
        }
        Memory::of(object).map(PageMemory::Whole)
    }

    /// Targets of a get: one for each page, or for each part.
    fn targets(&self, keys: &[PageKey], buffers: &[Bound<'_, PyAny>], holds: &Arc<Holds>) -> PyResult<Vec<PageTarget>> {
        check_pairs(keys, buffers)?;
        let mut targets = Vec::with_capacity(keys.len());
        for (index, (key, object)) in keys.iter().zip(buffers).enumerate() {
            match self.memory(object)? {
                PageMemory::Whole(memory) => {
                    let page_bytes = self.geometry().page_bytes();
                    let memory = memory.into_target(page_bytes, holds)?;
                    targets.push(PageTarget { page: index, key: *key, range: 0..page_bytes as u32, memory });
                }
                PageMemory::Parts(parts) => {
                    let lengths = self.geometry().part_table();
                    let parts = parts.into_iter().zip(lengths);
                    let parts = parts.map(|(memory, length)| memory.into_target(length as usize, holds));
                    let parts = parts.collect::<PyResult<Vec<_>>>()?;
                    targets.extend(targets_of_parts(self.geometry(), index, *key, parts));
                }
            }
        }
        check_distinct(targets.iter().map(|target| &target.memory)).map_err(invalid)?;
        Ok(targets)
    }

    /// Parts of the pages of a put.
    fn sources(&self, buffers: &[Bound<'_, PyAny>], holds: &Arc<Holds>) -> PyResult<Vec<Vec<Bytes>>> {
        let part_table = self.geometry().part_table();
        let parts = |object: &Bound<'_, PyAny>| match self.memory(object)? {
            PageMemory::Whole(memory) => {
                let mut page = memory.into_bytes(self.geometry().page_bytes(), holds)?;
                Ok(part_table.iter().map(|&length| page.split_to(length as usize)).collect())
            }
            PageMemory::Parts(parts) => {
                let lengths = part_table.iter().map(|&length| length as usize);
                parts.into_iter().zip(lengths).map(|(memory, length)| memory.into_bytes(length, holds)).collect()
            }
        };
        buffers.iter().map(parts).collect()
    }
}

enum PageMemory {
    Whole(Memory),
    Parts(Vec<Memory>),
}

fn check_pairs(keys: &[PageKey], buffers: &[Bound<'_, PyAny>]) -> PyResult<()> {
    if keys.len() == buffers.len() {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{} keys, but {} buffers", keys.len(), buffers.len())))
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::L2 => "L2",
        Tier::L3 => "L3",
    }
}

fn tier_names(py: Python<'_>, tiers: Vec<Option<Tier>>) -> PyResult<Py<PyAny>> {
    Ok(PyList::new(py, tiers.into_iter().map(|tier| tier.map(tier_name)))?.into_any().unbind())
}

fn outcome_name(outcome: PutOutcome) -> &'static str {
    match outcome {
        PutOutcome::Stored => "stored",
        PutOutcome::AlreadyThere => "already-there",
        PutOutcome::Refused => "refused",
        PutOutcome::Forgotten => "forgotten",
        PutOutcome::Retired => "retired",
        PutOutcome::InProgress => "in-progress",
        PutOutcome::Busy { .. } => "busy",
        PutOutcome::Lost => "lost",
    }
}

fn follow_name(end: FollowEnd) -> &'static str {
    match end {
        FollowEnd::Sealed => "sealed",
        FollowEnd::Aborted => "aborted",
        FollowEnd::Miss => "miss",
        FollowEnd::Busy => "busy",
    }
}

fn pin_kind(kind: &str) -> PyResult<PinKind> {
    match kind {
        "soft" => Ok(PinKind::Soft),
        "hard" => Ok(PinKind::Hard),
        "none" => Ok(PinKind::None),
        _ => Err(PyValueError::new_err("kind is soft, hard or none")),
    }
}

fn hint_of(kind: &str, retain: Option<f64>) -> PyResult<Hint> {
    match (kind, retain) {
        ("retain", Some(time)) => {
            let time = Duration::try_from_secs_f64(time);
            Ok(Hint::Retain(time.map_err(|_| PyValueError::new_err("retain is no duration"))?))
        }
        ("none", None) => Ok(Hint::None),
        ("demote", None) => Ok(Hint::Demote),
        ("session-ended", None) => Ok(Hint::SessionEnded),
        _ => Err(PyValueError::new_err("kind is none, demote, session-ended, or retain with a time to retain")),
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url, namespace, *, name="python", memory_bytes=256 << 20, connect_timeout=1.0))]
    fn new(url: &str, namespace: &Namespace, name: &str, memory_bytes: usize, connect_timeout: f64) -> PyResult<Self> {
        let url: StoreUrl = url.parse().map_err(|error| PyValueError::new_err(format!("{error}")))?;
        let connect_timeout = seconds(connect_timeout, "connect_timeout")?;
        let options = ClientOptions { name: name.into(), connect_timeout, memory_bytes, ..ClientOptions::default() };
        let namespace = namespace.descriptor.clone();
        let geometry = namespace.geometry;
        let session = Session::new(url, namespace, options).map_err(start_error)?;
        Ok(Client { geometry, session: Mutex::new(session) })
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.geometry().page_bytes()
    }

    #[getter]
    fn part_bytes(&self) -> Vec<u32> {
        self.geometry().part_table()
    }

    #[getter]
    fn nodes_connected(&self) -> PyResult<usize> {
        Ok(self.attached()?.nodes_connected())
    }

    #[pyo3(signature = (timeout, *, queue=None))]
    fn ready(&self, py: Python<'_>, timeout: f64, queue: Queue<'_, '_>) -> PyResult<Py<PyAny>> {
        let (client, timeout) = (self.attached()?, seconds(timeout, "timeout")?);
        run(py, queue, None, async move { client.ready(timeout).await }, to_python)
    }

    fn buffer(&self, size: usize) -> PyResult<Buffer> {
        if size == 0 || size > BUFFER_BYTES_MAX {
            return Err(PyValueError::new_err(format!("a buffer has 1 to {BUFFER_BYTES_MAX} bytes")));
        }
        Ok(Buffer::new(self.attached()?.buffer(size)))
    }

    #[pyo3(signature = (page_keys, timeout, *, queue=None))]
    fn locate(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        run(py, queue, None, async move { client.locate(&keys, deadline).await }, tier_names)
    }

    #[pyo3(signature = (page_keys, timeout, *, hold=0.0, queue=None))]
    fn lookup(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        hold: f64,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        let hold = seconds(hold, "hold")?;
        let work = async move { client.lookup(&keys, hold, deadline).await };
        run(py, queue, None, work, |py, lookup| Ok(Py::new(py, Lookup::from(lookup))?.into_any()))
    }

    #[pyo3(signature = (page_keys, buffers, timeout, *, busy_retries=0, queue=None))]
    fn get_into(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        buffers: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        busy_retries: u32,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        let _returns = ReturnAtEnd(py);
        let holds = Arc::new(Holds::default());
        let released = Some(holds.released());
        let targets = self.targets(&keys, &buffers, &holds)?;
        drop(holds);
        let options = GetOptions { busy_retries, ..GetOptions::default() };
        run(py, queue, released, larder_bindings::get(client, keys.len(), targets, options, deadline), tier_names)
    }

    #[pyo3(signature = (
        page_keys, buffers, timeout, *, parent=None, position=None, tokens=None, ttl=None, busy_retries=0, queue=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords of Python")]
    fn put_from(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        buffers: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        parent: Option<Bound<'_, PyAny>>,
        position: Option<u32>,
        tokens: Option<Vec<Vec<u32>>>,
        ttl: Option<f64>,
        busy_retries: u32,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        check_pairs(&keys, &buffers)?;
        let tokens = tokens.unwrap_or_default();
        if !tokens.is_empty() && tokens.len() != keys.len() {
            let error = format!("{} keys, but {} lists of tokens", keys.len(), tokens.len());
            return Err(PyValueError::new_err(error));
        }
        let parent = parent.as_ref().map(key).transpose()?;
        let ttl = ttl.map(|ttl| seconds(ttl, "ttl")).transpose()?;
        let _returns = ReturnAtEnd(py);
        let holds = Arc::new(Holds::default());
        let released = Some(holds.released());
        let sources = self.sources(&buffers, &holds)?;
        drop(holds);
        let pages: Vec<_> = new_pages(keys, parent, position, tokens).into_iter().zip(sources).collect();
        let options = PutOptions { ttl, busy_retries };
        let work = larder_bindings::put(client, pages, options, deadline);
        let names = |py: Python<'_>, outcomes: Vec<PutOutcome>| {
            Ok(PyList::new(py, outcomes.into_iter().map(outcome_name))?.into_any().unbind())
        };
        run(py, queue, released, work, names)
    }

    #[pyo3(signature = (page_keys, buffers, timeout, *, queue=None))]
    fn follow(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        buffers: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        let _returns = ReturnAtEnd(py);
        let holds = Arc::new(Holds::default());
        let released = Some(holds.released());
        let targets = self.targets(&keys, &buffers, &holds)?;
        drop(holds);
        if targets.len() > keys.len() {
            return Err(PyValueError::new_err("follow needs one buffer for the whole page"));
        }
        let work = larder_bindings::follow(client, targets, deadline);
        let names = |py: Python<'_>, ends: Vec<FollowEnd>| {
            Ok(PyList::new(py, ends.into_iter().map(follow_name))?.into_any().unbind())
        };
        run(py, queue, released, work, names)
    }

    #[pyo3(signature = (page_keys, timeout, *, ttl, kind="soft", queue=None))]
    fn pin(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        ttl: f64,
        kind: &str,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        // A pin may outlast the longest timeout; the node bounds it.
        let ttl = Duration::try_from_secs_f64(ttl).map_err(|_| PyValueError::new_err("ttl is no duration"))?;
        let kind = pin_kind(kind)?;
        run(py, queue, None, async move { client.pin(&keys, kind, ttl, deadline).await }, |py, pinned| {
            let Pinned { pages, refused, complete } = pinned;
            to_python(py, (pages, refused, complete))
        })
    }

    #[pyo3(signature = (page_keys, timeout, *, kind="none", generated=None, retain=None, queue=None))]
    #[allow(clippy::too_many_arguments, reason = "keywords of Python")]
    fn hint(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        kind: &str,
        generated: Option<u32>,
        retain: Option<f64>,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        let hint = hint_of(kind, retain)?;
        run(py, queue, None, async move { client.hint(&keys, generated, hint, deadline).await }, to_python)
    }

    #[pyo3(signature = (page_keys, timeout, *, queue=None))]
    fn warm(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        run(py, queue, None, async move { client.warm(&keys, deadline).await }, to_python)
    }

    #[pyo3(signature = (page_keys, timeout, *, queue=None))]
    fn forget(
        &self,
        py: Python<'_>,
        page_keys: Vec<Bound<'_, PyAny>>,
        timeout: f64,
        queue: Queue<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let (client, keys, deadline) = (self.attached()?, keys(&page_keys)?, deadline(timeout)?);
        run(py, queue, None, async move { client.forget(&keys, deadline).await }, |py, forgotten| {
            let Forgotten { pages, complete } = forgotten;
            to_python(py, (pages, complete))
        })
    }

    /// Status of the nodes, as JSON.
    #[pyo3(signature = (timeout, *, queue=None))]
    fn status(&self, py: Python<'_>, timeout: f64, queue: Queue<'_, '_>) -> PyResult<Py<PyAny>> {
        let (client, deadline) = (self.attached()?, deadline(timeout)?);
        let work = async move { serde_json::to_string(&client.status(deadline).await).unwrap_or_default() };
        run(py, queue, None, work, to_python)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.attached()?.stats();
        let counters = PyDict::new(py);
        for (name, value) in [
            ("get_hits", stats.get_hits),
            ("get_misses", stats.get_misses),
            ("gets_busy", stats.gets_busy),
            ("corrupt", stats.corrupt),
            ("puts", stats.puts),
            ("puts_lost", stats.puts_lost),
            ("puts_busy", stats.puts_busy),
        ] {
            counters.set_item(name, value)?;
        }
        Ok(counters)
    }
}

fn to_python<T: for<'py> IntoPyObject<'py>>(py: Python<'_>, value: T) -> PyResult<Py<PyAny>> {
    value.into_py_any(py)
}

/// Result of a lookup. It holds pages in the node until it is released.
#[pyclass(frozen, module = "larder_kv._native")]
pub(crate) struct Lookup {
    #[pyo3(get)]
    tiers: Vec<&'static str>,
    #[pyo3(get)]
    answered: bool,
    #[pyo3(get)]
    retry_after: Option<f64>,
    #[pyo3(get)]
    held: usize,
    #[pyo3(get)]
    expected: Vec<f64>,
    lease: Mutex<Option<PerProcess<Lease>>>,
}

impl From<larder_client::Lookup> for Lookup {
    fn from(lookup: larder_client::Lookup) -> Self {
        Lookup {
            tiers: lookup.tiers.into_iter().map(tier_name).collect(),
            answered: lookup.answered,
            retry_after: lookup.retry_after.map(|pause| pause.as_secs_f64()),
            held: lookup.held,
            expected: lookup.expected.iter().map(Duration::as_secs_f64).collect(),
            lease: Mutex::new(Some(PerProcess::new(lookup.lease))),
        }
    }
}

#[pymethods]
impl Lookup {
    /// Ends the hold.
    fn release(&self) {
        let lease = self.lease.lock().take();
        drop(lease);
    }

    fn __len__(&self) -> usize {
        self.tiers.len()
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.release();
    }
}
