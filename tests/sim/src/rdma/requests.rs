//! Execution of posted requests, one piece at a time, with the faults that the seed injects.
//!
//! Invariant: between two steps of a queue pair, any other task may run.

use super::{
    Access, Binding, Fabric, MemoryWindows, Registration, RequestEnd, RequestPlan, Transfer, WorkRequest, with_fabric,
};
use ibverbs_sys::{ibv_event_type, ibv_qp_state, ibv_wc_status};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Time that a device retries before it reports a silent peer.
const RETRY_TIMEOUT: Duration = Duration::from_secs(2);
const PIECES_MAX: u64 = 4;
/// Number of yields after which an event counts as ignored by its observers. The virtual clock
/// stands still during these yields.
const OBSERVE_YIELDS_MAX: usize = 1000;

enum Step {
    Idle,
    Until(Instant),
    Announced,
    Continue,
}

impl Fabric {
    fn step(&mut self, number: u32) -> Option<Step> {
        self.check_owners();
        let pair = self.pairs.get(&number)?;
        match pair.state {
            ibv_qp_state::IBV_QPS_ERR => return Some(self.flush(number)),
            ibv_qp_state::IBV_QPS_RTS => {}
            _ => return Some(Step::Idle),
        }
        let Some((work, due, end)) = self.plan_of(number, 0) else { return Some(Step::Idle) };
        if due > Instant::now() {
            return Some(Step::Until(due));
        }
        if let (WorkRequest::Transfer(transfer), Some(piece)) = (work, self.next_piece(number, 0)) {
            let moved = self.move_piece(number, transfer, piece, true);
            let latency = Duration::from_millis(self.random.between(0, self.faults().latency_ms_max));
            let plan = self.pairs.get_mut(&number)?.requests.front_mut()?.plan.as_mut()?;
            plan.due += latency;
            if let Err(status) = moved {
                plan.pieces.clear();
                plan.end = RequestEnd::Error(status);
                if status == ibv_wc_status::IBV_WC_RETRY_EXC_ERR {
                    plan.due += RETRY_TIMEOUT;
                }
            }
            return Some(Step::Continue);
        }
        if end == RequestEnd::Never {
            return Some(Step::Idle);
        }
        let request = self.pairs.get_mut(&number)?.requests.pop_front()?;
        match end {
            RequestEnd::Success => {
                let status = self.perform(number, work);
                self.complete(number, request.id, status);
                if status != ibv_wc_status::IBV_WC_SUCCESS {
                    self.fail(number);
                }
            }
            RequestEnd::Error(status) => {
                self.world.fault("rdma request fails", [number.into(), status.into(), 0]);
                self.complete(number, request.id, status);
                self.fail(number);
            }
            RequestEnd::AsyncEvent | RequestEnd::Never => {
                self.world.fault("rdma queue pair fails", [number.into(), 0, 0]);
                self.pairs.get_mut(&number)?.requests.push_front(request);
                let (context, object) =
                    self.pairs.get(&number).map(|pair| (pair.context, pair.raw.as_ptr() as usize))?;
                self.announce(context, ibv_event_type::IBV_EVENT_QP_FATAL, object);
                self.fail(number);
            }
        }
        Some(Step::Announced)
    }

    fn plan_of(&mut self, number: u32, at: usize) -> Option<(WorkRequest, Instant, RequestEnd)> {
        let request = self.pairs.get(&number)?.requests.get(at)?;
        let work = request.work;
        let fresh = request.plan.is_none();
        let new = fresh.then(|| self.plan(work));
        let request = self.pairs.get_mut(&number)?.requests.get_mut(at)?;
        let plan = match new {
            Some(plan) => request.plan.insert(plan),
            None => request.plan.as_mut()?,
        };
        Some((work, plan.due, plan.end))
    }

    fn next_piece(&mut self, number: u32, at: usize) -> Option<(u32, u32)> {
        self.pairs.get_mut(&number)?.requests.get_mut(at)?.plan.as_mut()?.pieces.pop_front()
    }

    fn plan(&mut self, work: WorkRequest) -> RequestPlan {
        let faults = self.faults();
        let random = &mut self.random;
        let mut due = Instant::now() + Duration::from_millis(random.between(0, faults.latency_ms_max));
        let mut pieces = VecDeque::new();
        if let WorkRequest::Transfer(transfer) = work {
            let len = transfer.local.1;
            if faults.bytes_per_second > 0 {
                due += Duration::from_secs_f64(f64::from(len) / faults.bytes_per_second as f64);
            }
            let mut cuts: Vec<u32> =
                (1..random.between(1, PIECES_MAX)).map(|_| random.below(len.into()) as u32).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            cuts.dedup();
            pieces = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
            if random.chance(faults.short) {
                self.world.fault("rdma truncated", [len.into(), 0, 0]);
                pieces.pop_back();
            }
        }
        if random.chance(faults.late) {
            let seconds = [1, 4, 8, 12][random.below(4) as usize];
            self.world.fault("rdma delayed", [seconds, 0, 0]);
            due += Duration::from_secs(seconds);
        }
        let statuses = [
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
            ibv_wc_status::IBV_WC_REM_OP_ERR,
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
            ibv_wc_status::IBV_WC_GENERAL_ERR,
        ];
        let end = if random.chance(faults.lost) {
            RequestEnd::Never
        } else if random.chance(faults.fail) {
            RequestEnd::Error(statuses[random.below(4) as usize])
        } else if random.chance(faults.event) {
            RequestEnd::AsyncEvent
        } else {
            RequestEnd::Success
        };
        if end == RequestEnd::Never {
            self.world.fault("rdma never completes", [0; 3]);
        }
        if end != RequestEnd::Success && !pieces.is_empty() {
            pieces.truncate(random.below(pieces.len() as u64 + 1) as usize);
        }
        RequestPlan { due, pieces, end }
    }

    fn flush(&mut self, number: u32) -> Step {
        let Some(pair) = self.pairs.get_mut(&number) else { return Step::Idle };
        if pair.requests.is_empty() {
            return Step::Idle;
        }
        if !pair.hangs {
            let ids: Vec<u64> = pair.requests.drain(..).map(|request| request.id).collect();
            ids.into_iter().for_each(|id| self.complete(number, id, ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
            return Step::Announced;
        }
        // Bytes that were in transit at the failure arrive late.
        for at in 0..pair.requests.len() {
            let Some((work, ..)) = self.plan_of(number, at) else { continue };
            if let (WorkRequest::Transfer(transfer), Some(piece)) = (work, self.next_piece(number, at)) {
                let moved = self.move_piece(number, transfer, piece, false);
                self.world.event("rdma late transfer", [number.into(), at as u64, moved.is_ok().into()]);
                self.world.count("rdma late transfers", moved.is_ok().into());
                return Step::Until(Instant::now() + Duration::from_millis(self.random.between(0, 300)));
            }
        }
        Step::Idle
    }

    /// Moves the bytes `from..to` of a transfer if both sides allow it. After a failure (`is_alive`
    /// is false), bytes that the peer had already sent still arrive, without another check at the
    /// peer.
    fn move_piece(
        &mut self,
        number: u32,
        transfer: Transfer,
        (from, to): (u32, u32),
        is_alive: bool,
    ) -> Result<(), u32> {
        let Transfer { is_read, local: (address, len, key), remote: (remote, remote_key), source } = transfer;
        let here = if is_read { Access::IBV_ACCESS_LOCAL_WRITE } else { Access(0) };
        let known =
            self.registrations.get(&(key >> 8)).is_some_and(|known| known.range.allows(address, len.into(), here));
        if !known {
            self.violation("a request names unregistered local memory");
            return Err(ibv_wc_status::IBV_WC_LOC_PROT_ERR);
        }
        let peer = self.pairs.get(&number).and_then(|pair| pair.peer);
        let there = peer.and_then(|peer| self.pairs.get(&peer)).filter(|there| {
            let hears = [ibv_qp_state::IBV_QPS_RTR, ibv_qp_state::IBV_QPS_RTS].contains(&there.state);
            hears && there.peer == Some(number)
        });
        let wanted = if is_read { Access::IBV_ACCESS_REMOTE_READ } else { Access::IBV_ACCESS_REMOTE_WRITE };
        let start = remote.wrapping_add(from.into());
        let bytes = u64::from(to - from);
        match there {
            Some(there) => {
                let context = there.context;
                let peer = peer.unwrap_or_default();
                if !self.is_access_allowed(peer, context, remote_key, start, bytes, wanted) {
                    if is_alive {
                        let fault = if self.fault_pauses > 0 { "rdma probe denied" } else { "rdma access denied" };
                        self.world.fault(fault, [number.into(), bytes, is_read.into()]);
                        if self.is_calm && self.fault_pauses == 0 {
                            self.violation("a request used a revoked key although no fault was injected");
                        }
                        let object = self.pairs.get(&peer).map_or(0, |pair| pair.raw.as_ptr() as usize);
                        self.announce(context, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR, object);
                        self.fail(peer);
                    }
                    return Err(ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
                }
            }
            None => {
                let source = source.and_then(|number| self.registrations.get(&number));
                let is_mapped = source.is_some_and(|known| known.range.allows(start, bytes, Access(0)));
                if is_alive || !is_read || !is_mapped {
                    return Err(ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
                }
            }
        }
        let local = address + u64::from(from);
        let (source, target) = if is_read { (start, local) } else { (local, start) };
        // SAFETY: both ranges lie in registered memory, which stays mapped until its registration
        // ends. There is one thread. Larder code that reads the bytes too early is the defect under
        // test.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes as usize) };
        self.world.count(if is_read { "rdma bytes read" } else { "rdma bytes written" }, bytes);
        if self.random.chance(self.faults().flip) {
            let at = target + self.random.below(bytes.max(1));
            self.world.fault("rdma bit flip", [number.into(), bytes, is_read.into()]);
            // SAFETY: as above. `at` is one of the target bytes.
            unsafe { *(at as *mut u8) ^= 1 << self.random.below(8) };
        }
        Ok(())
    }

    /// Registration of the peer's process that holds all remote bytes of `transfer`.
    pub(super) fn source_of(&self, number: u32, transfer: &Transfer) -> Option<u32> {
        let peer = self.pairs.get(&number)?.peer?;
        let context = self.pairs.get(&peer)?.context;
        let (start, bytes) = (transfer.remote.0, transfer.local.1.into());
        let holds = |known: &Registration| known.context == context && known.range.allows(start, bytes, Access(0));
        Some(*self.registrations.iter().find(|(_, known)| holds(known))?.0)
    }

    fn is_access_allowed(&self, pair: u32, context: usize, key: u32, start: u64, bytes: u64, wanted: Access) -> bool {
        if let Some(known) = self.registrations.get(&(key >> 8)) {
            return key & 0xff == 0 && known.context == context && known.range.allows(start, bytes, wanted);
        }
        let binding = self.windows.get(&(key >> 8)).and_then(|window| window.binding);
        binding.is_some_and(|binding| {
            binding.key == key && binding.pair == pair && binding.range.allows(start, bytes, wanted)
        })
    }

    /// Completes a request that has moved its bytes, or executes a bind or an invalidation. Returns
    /// its status.
    fn perform(&mut self, number: u32, work: WorkRequest) -> u32 {
        match work {
            WorkRequest::Transfer(transfer) => {
                self.world.count(if transfer.is_read { "rdma reads" } else { "rdma writes" }, 1);
            }
            WorkRequest::Bind { window, key, registration, mut range } => {
                let context = self.pairs.get(&number).map_or(0, |pair| pair.context);
                let broad =
                    self.device_of(context).is_some_and(|device| device.windows == MemoryWindows::WholeRegistration);
                let Some(known) = self.registrations.get(&registration) else {
                    self.violation("a window was bound to unregistered memory");
                    return ibv_wc_status::IBV_WC_MW_BIND_ERR;
                };
                let allowed = known.range.allows(range.start, range.len, Access::IBV_ACCESS_MW_BIND);
                let Some(window) = self.windows.get_mut(&window).filter(|window| allowed && window.binding.is_none())
                else {
                    self.violation("a window was bound outside its registration, or twice");
                    return ibv_wc_status::IBV_WC_MW_BIND_ERR;
                };
                if broad {
                    (range.start, range.len) = (known.range.start, known.range.len);
                }
                window.binding = Some(Binding { key, range, pair: number, registration });
                self.world.count("rdma grants", 1);
            }
            WorkRequest::Invalidate { key } => {
                let window = self.windows.get_mut(&(key >> 8));
                let binding = window
                    .and_then(|window| window.binding.take_if(|binding| binding.key == key && binding.pair == number));
                if binding.is_none() {
                    self.violation("a key was invalidated that is not live");
                    return ibv_wc_status::IBV_WC_LOC_QP_OP_ERR;
                }
            }
        }
        ibv_wc_status::IBV_WC_SUCCESS
    }

    fn has_unobserved_events(&self) -> bool {
        self.contexts.values().any(|context| !context.events.is_empty())
            || self.channels.values().any(|channel| !channel.events.is_empty())
    }
}

pub(super) async fn drive(number: u32, wake: Arc<Notify>) {
    loop {
        match with_fabric(|fabric| fabric.step(number)).flatten() {
            None => return,
            Some(Step::Idle) => wake.notified().await,
            Some(Step::Until(due)) => drop(timeout_at(due, wake.notified()).await),
            Some(Step::Announced) => wait_until_observed().await,
            Some(Step::Continue) => {}
        }
    }
}

/// Yields until all events were observed, or until their observers clearly ignore them. The virtual
/// clock stands still meanwhile. Otherwise it would jump ahead before the runtime polls the
/// descriptors.
async fn wait_until_observed() {
    for _ in 0..OBSERVE_YIELDS_MAX {
        if !with_fabric(|fabric| fabric.has_unobserved_events()).unwrap_or(false) {
            return;
        }
        tokio::task::yield_now().await;
    }
}
