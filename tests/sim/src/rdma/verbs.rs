//! The functions of libibverbs that Larder calls, over the devices of this thread's seed.

use super::{
    Bell, Bound, Channel, Context, Domain, Machine, MemoryWindow, Pair, Queue, Raw, Reach, Registration, Request,
    Transfer, What, Windows, drive, machine,
};
use ibverbs_sys::{
    IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_MTU_1024, IBV_MW_TYPE_2, ibv_async_event, ibv_comp_channel,
    ibv_context, ibv_context_ops, ibv_cq, ibv_device, ibv_device_attr, ibv_device_cap_flags, ibv_gid_entry, ibv_mr,
    ibv_mw, ibv_mw_type, ibv_pd, ibv_port_attr, ibv_port_state, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask,
    ibv_qp_init_attr, ibv_qp_state, ibv_send_wr, ibv_wc, ibv_wr_opcode,
};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Once};
use tokio::sync::Notify;

/// Error numbers of the kernel.
const EBUSY: c_int = 16;
const ENODEV: c_int = 19;
const EINVAL: c_int = 22;
/// Requests of a queue pair, and completions of a queue.
const REQUESTS_MAX: c_int = 4096;
const READS_MAX: c_int = 16;
const MESSAGE_BYTES_MAX: u32 = 1 << 30;

/// These functions are called from now on, in all of the process.
pub(super) fn stand_in() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: they have the types of `ibverbs_sys`, and do what the manual says; the simulation calls none before.
        unsafe { ibverbs_sys::stand_in(symbol) };
    });
}

fn symbol(name: &str) -> Option<NonNull<c_void>> {
    let function = match name {
        "ibv_get_device_list" => ibv_get_device_list as *mut c_void,
        "ibv_free_device_list" => ibv_free_device_list as *mut c_void,
        "ibv_get_device_name" => ibv_get_device_name as *mut c_void,
        "ibv_open_device" => ibv_open_device as *mut c_void,
        "ibv_close_device" => ibv_close_device as *mut c_void,
        "ibv_query_device" => ibv_query_device as *mut c_void,
        "ibv_query_port" => ibv_query_port as *mut c_void,
        "_ibv_query_gid_table" => ibv_query_gid_table as *mut c_void,
        "ibv_get_async_event" => ibv_get_async_event as *mut c_void,
        "ibv_ack_async_event" => ibv_ack_async_event as *mut c_void,
        "ibv_alloc_pd" => ibv_alloc_pd as *mut c_void,
        "ibv_dealloc_pd" => ibv_dealloc_pd as *mut c_void,
        "ibv_reg_mr" => ibv_reg_mr as *mut c_void,
        "ibv_dereg_mr" => ibv_dereg_mr as *mut c_void,
        "ibv_create_comp_channel" => ibv_create_comp_channel as *mut c_void,
        "ibv_destroy_comp_channel" => ibv_destroy_comp_channel as *mut c_void,
        "ibv_create_cq" => ibv_create_cq as *mut c_void,
        "ibv_destroy_cq" => ibv_destroy_cq as *mut c_void,
        "ibv_get_cq_event" => ibv_get_cq_event as *mut c_void,
        "ibv_ack_cq_events" => ibv_ack_cq_events as *mut c_void,
        "ibv_create_qp" => ibv_create_qp as *mut c_void,
        "ibv_modify_qp" => ibv_modify_qp as *mut c_void,
        "ibv_destroy_qp" => ibv_destroy_qp as *mut c_void,
        // A device without a number and a GUID.
        _ => return None,
    };
    NonNull::new(function)
}

/// Makes an object and answers where it is; null if it cannot be made.
fn made<T>(make: impl FnOnce(&mut Machine) -> Option<*mut T>) -> *mut T {
    machine(make).flatten().unwrap_or(null_mut())
}

fn done(work: impl FnOnce(&mut Machine) -> c_int) -> c_int {
    machine(work).unwrap_or(ENODEV)
}

/// Destroys an object unless others depend on it, which is a misuse.
fn ended<T>(machine: &mut Machine, what: &str, is_used: bool, object: Option<T>) -> c_int {
    if is_used {
        machine.misused(&format!("a {what} is destroyed that is in use"));
    } else if object.is_none() {
        machine.misused(&format!("a {what} is destroyed that there is none of"));
    }
    0
}

unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    made(|machine| {
        let list: Box<[*mut ibv_device]> = machine.devices.iter().map(|device| device.raw.as_ptr()).collect();
        // SAFETY: the caller has room for a number.
        unsafe { *count = list.len() as c_int };
        Some(Box::leak(list).as_mut_ptr())
    })
}

unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    machine(|machine| {
        let whole = std::ptr::slice_from_raw_parts_mut(list, machine.devices.len());
        // SAFETY: it was made of such a box, of all devices, and is given back once.
        drop(unsafe { Box::from_raw(whole) });
    });
}

unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    let name = |machine: &mut Machine| {
        let found = machine.devices.iter().find(|known| known.raw.as_ptr() == device);
        found.map(|known| known.name.as_ptr())
    };
    machine(name).flatten().unwrap_or(null())
}

unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    made(|machine| {
        let at = machine.devices.iter().position(|known| known.raw.as_ptr() == device)?;
        let bell = Bell::new().ok()?;
        let ops = ibv_context_ops {
            alloc_mw: Some(alloc_mw),
            dealloc_mw: Some(dealloc_mw),
            poll_cq: Some(poll_cq),
            req_notify_cq: Some(req_notify_cq),
            post_send: Some(post_send),
            ..ibv_context_ops::default()
        };
        let raw = Raw::new(ibv_context { device, ops, async_fd: bell.fd(), ..ibv_context::default() });
        let address = raw.as_ptr();
        machine.contexts.insert(address as usize, Context { device: at, events: VecDeque::new(), bell, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    done(|machine| {
        let used = machine.domains.values().any(|domain| domain.context == context as usize);
        let context = machine.contexts.remove(&(context as usize));
        ended(machine, "context", used, context)
    })
}

unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    done(|machine| {
        let Some(device) = machine.device_of(context as usize) else { return EINVAL };
        let device_cap_flags = match device.windows {
            Windows::None => 0,
            Windows::Narrow | Windows::Broad => ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0,
        };
        let answer = ibv_device_attr {
            device_cap_flags,
            max_qp_wr: REQUESTS_MAX,
            max_cqe: REQUESTS_MAX,
            max_qp_rd_atom: READS_MAX,
            max_qp_init_rd_atom: READS_MAX,
            phys_port_cnt: 1,
            ..ibv_device_attr::default()
        };
        // SAFETY: the caller has room for it.
        unsafe { attributes.write(answer) };
        0
    })
}

unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int {
    done(|machine| {
        if port != 1 || machine.device_of(context as usize).is_none() {
            return EINVAL;
        }
        let answer = ibv_port_attr {
            state: ibv_port_state::IBV_PORT_ACTIVE,
            active_mtu: IBV_MTU_1024,
            max_mtu: IBV_MTU_1024,
            max_msg_sz: MESSAGE_BYTES_MAX,
            gid_tbl_len: 1,
            link_layer: IBV_LINK_LAYER_ETHERNET as u8,
            ..ibv_port_attr::default()
        };
        // SAFETY: the caller has room for it.
        unsafe { attributes.write(answer) };
        0
    })
}

unsafe extern "C" fn ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    most: usize,
    _flags: u32,
    _entry_bytes: usize,
) -> isize {
    let only = |machine: &mut Machine| {
        let device = machine.device_of(context as usize).filter(|_| most > 0)?;
        let entry = ibv_gid_entry {
            gid: ibverbs_sys::ibv_gid { raw: device.gid },
            gid_index: 0,
            port_num: 1,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ndev_ifindex: 0,
        };
        // SAFETY: there is room for one.
        unsafe { entries.write(entry) };
        Some(1)
    };
    machine(only).flatten().unwrap_or(-(ENODEV as isize))
}

unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let next = |machine: &mut Machine| {
        let context = machine.contexts.get_mut(&(context as usize))?;
        let (kind, object) = context.events.pop_front()?;
        context.bell.hush();
        // SAFETY: the caller has room for an event; whatever the object is, it is one word.
        unsafe {
            (*event).event_type = kind;
            (*event).element.qp = object as *mut ibv_qp;
        }
        Some(0)
    };
    machine(next).flatten().unwrap_or(-1)
}

unsafe extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}

unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    made(|machine| {
        machine.device_of(context as usize)?;
        let raw = Raw::new(ibv_pd { context, ..ibv_pd::default() });
        let address = raw.as_ptr();
        machine.domains.insert(address as usize, Domain { context: context as usize, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
    done(|machine| {
        let here = machine.domains.get(&(domain as usize)).map(|domain| domain.context);
        let used = machine.pairs.values().any(|pair| Some(pair.context) == here)
            || machine.registrations.values().any(|registration| Some(registration.context) == here);
        let domain = machine.domains.remove(&(domain as usize));
        ended(machine, "domain", used, domain.map(|domain| domain.raw))
    })
}

unsafe extern "C" fn ibv_reg_mr(domain: *mut ibv_pd, start: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    made(|machine| {
        let context = machine.domains.get(&(domain as usize))?.context;
        if machine.refuses("rdma: no registration") {
            return None;
        }
        let number = machine.number();
        let (lkey, rkey) = (number << 8, number << 8);
        let raw = Raw::new(ibv_mr { pd: domain, addr: start, length: len, lkey, rkey, ..ibv_mr::default() });
        let address = raw.as_ptr();
        let reach = Reach { start: start as u64, len: len as u64, access: access as u32 };
        machine.registrations.insert(number, Registration { reach, context, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_dereg_mr(registration: *mut ibv_mr) -> c_int {
    done(|machine| {
        machine.check_owners();
        let found = machine.registrations.iter().find(|(_, known)| known.raw.as_ptr() == registration);
        let Some(number) = found.map(|(number, _)| *number) else {
            return ended(machine, "registration", false, None::<()>);
        };
        let bound = |window: &MemoryWindow| window.bound.is_some_and(|bound| bound.registration == number);
        if machine.windows.values().any(bound) {
            machine.misused("a registration ends in which a window is open");
            return EBUSY;
        }
        machine.registrations.remove(&number);
        0
    })
}

unsafe extern "C" fn alloc_mw(domain: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    made(|machine| {
        let context = machine.domains.get(&(domain as usize))?.context;
        let has_some = machine.device_of(context)?.windows != Windows::None;
        if !has_some || kind != IBV_MW_TYPE_2 || machine.refuses("rdma: no window") {
            return None;
        }
        let number = machine.number();
        let context = machine.contexts.get(&context)?.raw.as_ptr();
        let raw = Raw::new(ibv_mw { context, pd: domain, rkey: number << 8, ..ibv_mw::default() });
        let address = raw.as_ptr();
        machine.windows.insert(number, MemoryWindow { bound: None::<Bound>, raw });
        Some(address)
    })
}

unsafe extern "C" fn dealloc_mw(window: *mut ibv_mw) -> c_int {
    done(|machine| {
        let found = machine.windows.iter().find(|(_, known)| known.raw.as_ptr() == window);
        let number = found.map(|(number, _)| *number);
        let window = number.and_then(|number| machine.windows.remove(&number));
        ended(machine, "window", false, window)
    })
}

unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    made(|machine| {
        machine.device_of(context as usize)?;
        let bell = Bell::new().ok()?;
        let raw = Raw::new(ibv_comp_channel { context, fd: bell.fd(), ..ibv_comp_channel::default() });
        let address = raw.as_ptr();
        machine.channels.insert(address as usize, Channel { events: VecDeque::new(), bell, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    done(|machine| {
        let used = machine.queues.values().any(|queue| queue.channel == channel as usize);
        let channel = machine.channels.remove(&(channel as usize));
        ended(machine, "channel", used, channel.map(|channel| channel.raw))
    })
}

unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    _user: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    made(|machine| {
        machine.device_of(context as usize)?;
        let raw = Raw::new(ibv_cq { context, channel, ..ibv_cq::default() });
        let (address, channel) = (raw.as_ptr(), channel as usize);
        let entries = usize::try_from(entries).ok()?;
        let queue = Queue { channel, entries, completions: VecDeque::new(), armed: false, raw };
        machine.queues.insert(address as usize, queue);
        Some(address)
    })
}

unsafe extern "C" fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int {
    done(|machine| {
        let used = machine.pairs.values().any(|pair| pair.queue == queue as usize);
        let at = queue as usize;
        let queue = machine.queues.remove(&at);
        if let Some(channel) = queue.as_ref().and_then(|queue| machine.channels.get_mut(&queue.channel)) {
            channel.events.retain(|&event| event != at);
        }
        ended(machine, "completion queue", used, queue.map(|queue| queue.raw))
    })
}

unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    user: *mut *mut c_void,
) -> c_int {
    let next = |machine: &mut Machine| {
        let channel = machine.channels.get_mut(&(channel as usize))?;
        let event = channel.events.pop_front()?;
        channel.bell.hush();
        // SAFETY: the caller has room for both.
        unsafe { (*queue, *user) = (event as *mut ibv_cq, null_mut()) };
        Some(0)
    };
    machine(next).flatten().unwrap_or(-1)
}

unsafe extern "C" fn ibv_ack_cq_events(_queue: *mut ibv_cq, _count: c_uint) {}

unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, most: c_int, room: *mut ibv_wc) -> c_int {
    let poll = |machine: &mut Machine| {
        let queue = machine.queues.get_mut(&(queue as usize))?;
        let count = queue.completions.len().min(usize::try_from(most).ok()?);
        for (at, completion) in queue.completions.drain(..count).enumerate() {
            // SAFETY: there is room for so many.
            unsafe { room.add(at).write(completion) };
        }
        Some(count as c_int)
    };
    machine(poll).flatten().unwrap_or(-1)
}

unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _solicited: c_int) -> c_int {
    done(|machine| match machine.queues.get_mut(&(queue as usize)) {
        Some(queue) => {
            queue.armed = true;
            0
        }
        None => EINVAL,
    })
}

unsafe extern "C" fn ibv_create_qp(domain: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller filled it in.
    let (queue, requests_max) = unsafe { ((*attributes).send_cq, (*attributes).cap.max_send_wr as usize) };
    made(|machine| {
        let context = machine.domains.get(&(domain as usize))?.context;
        if machine.refuses("rdma: no queue pair") {
            return None;
        }
        let (number, wake) = (machine.number(), Arc::new(Notify::new()));
        let address = machine.contexts.get(&context)?.raw.as_ptr();
        let raw = Raw::new(ibv_qp { context: address, pd: domain, qp_num: number, ..ibv_qp::default() });
        let address = raw.as_ptr();
        tokio::spawn(drive(number, wake.clone()));
        let pair = Pair {
            state: ibv_qp_state::IBV_QPS_RESET,
            requests_max,
            peer: None,
            requests: VecDeque::new(),
            hangs: false,
            queue: queue as usize,
            context,
            wake,
            raw,
        };
        machine.pairs.insert(number, pair);
        machine.world.count("rdma pairs", 1);
        Some(address)
    })
}

/// The number of a queue pair.
fn number(pair: *mut ibv_qp) -> u32 {
    // SAFETY: it was made here, and its caller has not destroyed it.
    unsafe { (*pair).qp_num }
}

unsafe extern "C" fn ibv_modify_qp(pair: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let number = number(pair);
    // SAFETY: the caller filled it in.
    let to = unsafe { *attributes };
    done(|machine| {
        if to.qp_state == ibv_qp_state::IBV_QPS_ERR {
            machine.fail(number);
            return 0;
        }
        if machine.refuses("rdma: no other state") {
            return EINVAL;
        }
        let Some(pair) = machine.pairs.get_mut(&number) else { return EINVAL };
        // One state after the other.
        if to.qp_state != pair.state + 1 {
            return EINVAL;
        }
        pair.state = to.qp_state;
        if mask as u32 & ibv_qp_attr_mask::IBV_QP_DEST_QPN.0 != 0 {
            pair.peer = Some(to.dest_qp_num);
        }
        pair.wake.notify_one();
        0
    })
}

unsafe extern "C" fn ibv_destroy_qp(pair: *mut ibv_qp) -> c_int {
    let number = number(pair);
    done(|machine| {
        machine.check_owners();
        // What is not withdrawn is over with it.
        for window in machine.windows.values_mut() {
            window.bound.take_if(|bound| bound.pair == number);
        }
        let pair = machine.pairs.remove(&number);
        if let Some(pair) = &pair {
            pair.wake.notify_one();
            let object = pair.raw.as_ptr() as usize;
            if let Some(context) = machine.contexts.get_mut(&pair.context) {
                context.events.retain(|event| event.1 != object);
            }
        }
        ended(machine, "queue pair", false, pair)
    })
}

/// A request as it was posted.
///
/// # Safety
/// It is filled in as its kind wants.
unsafe fn request(entry: &ibv_send_wr) -> Option<What> {
    match entry.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_READ | ibv_wr_opcode::IBV_WR_RDMA_WRITE => {
            // SAFETY: a transfer has a piece, and says where the peer's bytes are.
            let (local, remote) = unsafe { (*entry.sg_list, entry.wr.rdma) };
            Some(What::Transfer(Transfer {
                is_read: entry.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ,
                local: (local.addr, local.length, local.lkey),
                remote: (remote.remote_addr, remote.rkey),
            }))
        }
        ibv_wr_opcode::IBV_WR_BIND_MW => {
            // SAFETY: a binding says what is bound to what, both of which there are.
            let (bind, window, registration) = unsafe {
                let bind = entry.__bindgen_anon_2.bind_mw;
                (bind, (*bind.mw).rkey >> 8, (*bind.bind_info.mr).rkey >> 8)
            };
            let (start, len, access) = (bind.bind_info.addr, bind.bind_info.length, bind.bind_info.mw_access_flags);
            Some(What::Bind { window, key: bind.rkey, registration, reach: Reach { start, len, access } })
        }
        ibv_wr_opcode::IBV_WR_LOCAL_INV => {
            // SAFETY: a withdrawal says which key.
            Some(What::Invalidate { key: unsafe { entry.__bindgen_anon_1.invalidate_rkey } })
        }
        _ => None,
    }
}

unsafe extern "C" fn post_send(pair: *mut ibv_qp, first: *mut ibv_send_wr, refused: *mut *mut ibv_send_wr) -> c_int {
    let number = number(pair);
    done(|machine| {
        let mut at = first;
        while let Some(entry) = NonNull::new(at) {
            // SAFETY: the chain lives through this call.
            let entry = unsafe { entry.as_ref() };
            // SAFETY: the caller filled it in.
            let what = unsafe { request(entry) };
            let refuses = machine.refuses("rdma: no request");
            let pair = machine.pairs.get_mut(&number);
            let (Some(what), Some(pair), false) = (what, pair, refuses) else {
                // SAFETY: the caller has room for it.
                unsafe { *refused = at };
                return EINVAL;
            };
            pair.requests.push_back(Request { id: entry.wr_id, what, plan: None });
            let in_order = [ibv_qp_state::IBV_QPS_RTS, ibv_qp_state::IBV_QPS_ERR].contains(&pair.state);
            if !in_order || pair.requests.len() > pair.requests_max {
                machine.misused("a request is posted for which there is no room, or before a pair may speak");
            }
            at = entry.next;
        }
        machine.check_owners();
        if let Some(pair) = machine.pairs.get(&number) {
            pair.wake.notify_one();
        }
        0
    })
}
