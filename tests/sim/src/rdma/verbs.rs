//! The libibverbs functions that Larder calls, implemented over the devices of this thread's seed.

use super::{
    AccessRange, Binding, CompletionChannel, CompletionQueue, Context, Fabric, HeapObject, MemoryWindow, MemoryWindows,
    PostedRequest, ProtectionDomain, QueuePair, ReadinessFd, Registration, Transfer, WorkRequest, requests::drive,
    with_fabric,
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

const EBUSY: c_int = 16;
const ENODEV: c_int = 19;
const EINVAL: c_int = 22;
const REQUESTS_MAX: c_int = 4096;
const READS_MAX: c_int = 16;
const MESSAGE_BYTES_MAX: u32 = 1 << 30;

/// Redirects all verbs calls of this process to this module. Seeds on several threads stay apart,
/// because the fabric is thread-local.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: each function has the type that `ibverbs_sys` declares and follows the manual. No
        // verbs call precedes this one.
        unsafe { ibverbs_sys::replace_library(symbol) };
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
        // Larder can work without the remaining functions.
        _ => return None,
    };
    NonNull::new(function)
}

/// Creates an object and returns its address, or null on failure.
fn create_object<T>(make: impl FnOnce(&mut Fabric) -> Option<*mut T>) -> *mut T {
    with_fabric(make).flatten().unwrap_or(null_mut())
}

fn with_status(work: impl FnOnce(&mut Fabric) -> c_int) -> c_int {
    with_fabric(work).unwrap_or(ENODEV)
}

/// Completes the destruction of an object. Destroying a used or unknown object is a violation.
fn destroyed<T>(fabric: &mut Fabric, object_kind: &str, is_used: bool, object: Option<T>) -> c_int {
    if is_used {
        fabric.violation(&format!("a {object_kind} was destroyed while in use"));
    } else if object.is_none() {
        fabric.violation(&format!("a {object_kind} was destroyed that does not exist"));
    }
    0
}

unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    create_object(|fabric| {
        let list: Box<[*mut ibv_device]> = fabric.devices.iter().map(|device| device.raw.as_ptr()).collect();
        // SAFETY: the caller passes a valid pointer to an int.
        unsafe { *count = list.len() as c_int };
        Some(Box::leak(list).as_mut_ptr())
    })
}

unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    with_fabric(|fabric| {
        let whole = std::ptr::slice_from_raw_parts_mut(list, fabric.devices.len());
        // SAFETY: the list was leaked from a box of this length, and the caller frees it once.
        drop(unsafe { Box::from_raw(whole) });
    });
}

unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    let name = |fabric: &mut Fabric| {
        let found = fabric.devices.iter().find(|known| known.raw.as_ptr() == device);
        found.map(|known| known.name.as_ptr())
    };
    with_fabric(name).flatten().unwrap_or(null())
}

unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    create_object(|fabric| {
        let at = fabric.devices.iter().position(|known| known.raw.as_ptr() == device)?;
        let readiness = ReadinessFd::new().ok()?;
        let ops = ibv_context_ops {
            alloc_mw: Some(alloc_mw),
            dealloc_mw: Some(dealloc_mw),
            poll_cq: Some(poll_cq),
            req_notify_cq: Some(req_notify_cq),
            post_send: Some(post_send),
            ..ibv_context_ops::default()
        };
        let raw = HeapObject::new(ibv_context { device, ops, async_fd: readiness.fd(), ..ibv_context::default() });
        let address = raw.as_ptr();
        fabric.contexts.insert(address as usize, Context { device: at, events: VecDeque::new(), readiness, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    with_status(|fabric| {
        let used = fabric.domains.values().any(|domain| domain.context == context as usize);
        let context = fabric.contexts.remove(&(context as usize));
        destroyed(fabric, "context", used, context)
    })
}

unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    with_status(|fabric| {
        let Some(device) = fabric.device_of(context as usize) else { return EINVAL };
        let device_cap_flags = match device.windows {
            MemoryWindows::None => 0,
            MemoryWindows::Exact | MemoryWindows::WholeRegistration => {
                ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0
            }
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
        // SAFETY: the caller passes a valid pointer to the attributes.
        unsafe { attributes.write(answer) };
        0
    })
}

unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int {
    with_status(|fabric| {
        if port != 1 || fabric.device_of(context as usize).is_none() {
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
        // SAFETY: the caller passes a valid pointer to the attributes.
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
    let only = |fabric: &mut Fabric| {
        let device = fabric.device_of(context as usize).filter(|_| most > 0)?;
        let entry = ibv_gid_entry {
            gid: ibverbs_sys::ibv_gid { raw: device.gid },
            gid_index: 0,
            port_num: 1,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ndev_ifindex: 0,
        };
        // SAFETY: `most` is at least 1, so the caller has room for one entry.
        unsafe { entries.write(entry) };
        Some(1)
    };
    with_fabric(only).flatten().unwrap_or(-(ENODEV as isize))
}

unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let next = |fabric: &mut Fabric| {
        let context = fabric.contexts.get_mut(&(context as usize))?;
        let (kind, object) = context.events.pop_front()?;
        context.readiness.clear_one();
        // SAFETY: the caller passes a valid event. Every member of the union is one pointer.
        unsafe {
            (*event).event_type = kind;
            (*event).element.qp = object as *mut ibv_qp;
        }
        Some(0)
    };
    with_fabric(next).flatten().unwrap_or(-1)
}

unsafe extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}

unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    create_object(|fabric| {
        fabric.device_of(context as usize)?;
        let raw = HeapObject::new(ibv_pd { context, ..ibv_pd::default() });
        let address = raw.as_ptr();
        fabric.domains.insert(address as usize, ProtectionDomain { context: context as usize, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
    with_status(|fabric| {
        let here = fabric.domains.get(&(domain as usize)).map(|domain| domain.context);
        let used = fabric.pairs.values().any(|pair| Some(pair.context) == here)
            || fabric.registrations.values().any(|registration| Some(registration.context) == here);
        let domain = fabric.domains.remove(&(domain as usize));
        destroyed(fabric, "domain", used, domain.map(|domain| domain.raw))
    })
}

unsafe extern "C" fn ibv_reg_mr(domain: *mut ibv_pd, start: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    create_object(|fabric| {
        let context = fabric.domains.get(&(domain as usize))?.context;
        if fabric.injects_refusal("rdma: registration refused") {
            return None;
        }
        let number = fabric.next_number();
        let lkey = number << 8;
        let rkey = number << 8;
        let raw = HeapObject::new(ibv_mr { pd: domain, addr: start, length: len, lkey, rkey, ..ibv_mr::default() });
        let address = raw.as_ptr();
        let range = AccessRange { start: start as u64, len: len as u64, access: access as u32 };
        fabric.registrations.insert(number, Registration { range, context, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_dereg_mr(registration: *mut ibv_mr) -> c_int {
    with_status(|fabric| {
        fabric.check_owners();
        let found = fabric.registrations.iter().find(|(_, known)| known.raw.as_ptr() == registration);
        let Some(number) = found.map(|(number, _)| *number) else {
            return destroyed(fabric, "registration", false, None::<()>);
        };
        let binding = |window: &MemoryWindow| window.binding.is_some_and(|binding| binding.registration == number);
        if fabric.windows.values().any(binding) {
            fabric.violation("a registration was destroyed while a window is bound to it");
            return EBUSY;
        }
        fabric.registrations.remove(&number);
        0
    })
}

unsafe extern "C" fn alloc_mw(domain: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    create_object(|fabric| {
        let context = fabric.domains.get(&(domain as usize))?.context;
        let has_some = fabric.device_of(context)?.windows != MemoryWindows::None;
        if !has_some || kind != IBV_MW_TYPE_2 || fabric.injects_refusal("rdma: window refused") {
            return None;
        }
        let number = fabric.next_number();
        let context = fabric.contexts.get(&context)?.raw.as_ptr();
        let raw = HeapObject::new(ibv_mw { context, pd: domain, rkey: number << 8, ..ibv_mw::default() });
        let address = raw.as_ptr();
        fabric.windows.insert(number, MemoryWindow { binding: None::<Binding>, raw });
        Some(address)
    })
}

unsafe extern "C" fn dealloc_mw(window: *mut ibv_mw) -> c_int {
    with_status(|fabric| {
        let found = fabric.windows.iter().find(|(_, known)| known.raw.as_ptr() == window);
        let number = found.map(|(number, _)| *number);
        let window = number.and_then(|number| fabric.windows.remove(&number));
        destroyed(fabric, "window", false, window)
    })
}

unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    create_object(|fabric| {
        fabric.device_of(context as usize)?;
        let readiness = ReadinessFd::new().ok()?;
        let raw = HeapObject::new(ibv_comp_channel { context, fd: readiness.fd(), ..ibv_comp_channel::default() });
        let address = raw.as_ptr();
        fabric.channels.insert(address as usize, CompletionChannel { events: VecDeque::new(), readiness, raw });
        Some(address)
    })
}

unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    with_status(|fabric| {
        let used = fabric.queues.values().any(|queue| queue.channel == channel as usize);
        let channel = fabric.channels.remove(&(channel as usize));
        destroyed(fabric, "channel", used, channel.map(|channel| channel.raw))
    })
}

unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    _user: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    create_object(|fabric| {
        fabric.device_of(context as usize)?;
        let raw = HeapObject::new(ibv_cq { context, channel, ..ibv_cq::default() });
        let address = raw.as_ptr();
        let channel = channel as usize;
        let entries = usize::try_from(entries).ok()?;
        let queue = CompletionQueue { channel, entries, completions: VecDeque::new(), armed: false, raw };
        fabric.queues.insert(address as usize, queue);
        Some(address)
    })
}

unsafe extern "C" fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int {
    with_status(|fabric| {
        let used = fabric.pairs.values().any(|pair| pair.queue == queue as usize);
        let at = queue as usize;
        let queue = fabric.queues.remove(&at);
        if let Some(channel) = queue.as_ref().and_then(|queue| fabric.channels.get_mut(&queue.channel)) {
            channel.events.retain(|&event| event != at);
        }
        destroyed(fabric, "completion queue", used, queue.map(|queue| queue.raw))
    })
}

unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    user: *mut *mut c_void,
) -> c_int {
    let next = |fabric: &mut Fabric| {
        let channel = fabric.channels.get_mut(&(channel as usize))?;
        let event = channel.events.pop_front()?;
        channel.readiness.clear_one();
        // SAFETY: the caller passes two valid pointers.
        unsafe { (*queue, *user) = (event as *mut ibv_cq, null_mut()) };
        Some(0)
    };
    with_fabric(next).flatten().unwrap_or(-1)
}

unsafe extern "C" fn ibv_ack_cq_events(_queue: *mut ibv_cq, _count: c_uint) {}

unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, most: c_int, room: *mut ibv_wc) -> c_int {
    let poll = |fabric: &mut Fabric| {
        let queue = fabric.queues.get_mut(&(queue as usize))?;
        let count = queue.completions.len().min(usize::try_from(most).ok()?);
        for (at, completion) in queue.completions.drain(..count).enumerate() {
            // SAFETY: the caller has room for `most` completions, and `count` is not larger.
            unsafe { room.add(at).write(completion) };
        }
        Some(count as c_int)
    };
    with_fabric(poll).flatten().unwrap_or(-1)
}

unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _solicited: c_int) -> c_int {
    with_status(|fabric| match fabric.queues.get_mut(&(queue as usize)) {
        Some(queue) => {
            queue.armed = true;
            0
        }
        None => EINVAL,
    })
}

unsafe extern "C" fn ibv_create_qp(domain: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller passes initialised attributes.
    let (queue, requests_max) = unsafe { ((*attributes).send_cq, (*attributes).cap.max_send_wr as usize) };
    create_object(|fabric| {
        let context = fabric.domains.get(&(domain as usize))?.context;
        if fabric.injects_refusal("rdma: queue pair refused") {
            return None;
        }
        let number = fabric.next_number();
        let wake = Arc::new(Notify::new());
        let address = fabric.contexts.get(&context)?.raw.as_ptr();
        let raw = HeapObject::new(ibv_qp { context: address, pd: domain, qp_num: number, ..ibv_qp::default() });
        let address = raw.as_ptr();
        tokio::spawn(drive(number, wake.clone()));
        let pair = QueuePair {
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
        fabric.pairs.insert(number, pair);
        fabric.world.count("rdma queue pairs", 1);
        Some(address)
    })
}

fn number(pair: *mut ibv_qp) -> u32 {
    // SAFETY: `ibv_create_qp` made the object, and the caller has not destroyed it.
    unsafe { (*pair).qp_num }
}

unsafe extern "C" fn ibv_modify_qp(pair: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let number = number(pair);
    // SAFETY: the caller passes initialised attributes.
    let to = unsafe { *attributes };
    with_status(|fabric| {
        if to.qp_state == ibv_qp_state::IBV_QPS_ERR {
            fabric.fail(number);
            return 0;
        }
        if fabric.injects_refusal("rdma: state change refused") {
            return EINVAL;
        }
        let Some(pair) = fabric.pairs.get_mut(&number) else { return EINVAL };
        // The manual allows only RESET → INIT → RTR → RTS.
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
    with_status(|fabric| {
        fabric.check_owners();
        // Destroying a queue pair invalidates its windows.
        for window in fabric.windows.values_mut() {
            window.binding.take_if(|binding| binding.pair == number);
        }
        let pair = fabric.pairs.remove(&number);
        if let Some(pair) = &pair {
            pair.wake.notify_one();
            let object = pair.raw.as_ptr() as usize;
            if let Some(context) = fabric.contexts.get_mut(&pair.context) {
                context.events.retain(|event| event.1 != object);
            }
        }
        destroyed(fabric, "queue pair", false, pair)
    })
}

/// Decodes a posted work request.
///
/// # Safety
/// All fields that its opcode requires are initialised.
unsafe fn request(entry: &ibv_send_wr) -> Option<WorkRequest> {
    match entry.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_READ | ibv_wr_opcode::IBV_WR_RDMA_WRITE => {
            // SAFETY: a transfer has one local segment and a remote address.
            let (local, remote) = unsafe { (*entry.sg_list, entry.wr.rdma) };
            Some(WorkRequest::Transfer(Transfer {
                is_read: entry.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ,
                local: (local.addr, local.length, local.lkey),
                remote: (remote.remote_addr, remote.rkey),
                source: None,
            }))
        }
        ibv_wr_opcode::IBV_WR_BIND_MW => {
            // SAFETY: a bind names a window and a registration, and both exist.
            let (bind, window, registration) = unsafe {
                let bind = entry.__bindgen_anon_2.bind_mw;
                (bind, (*bind.mw).rkey >> 8, (*bind.bind_info.mr).rkey >> 8)
            };
            let start = bind.bind_info.addr;
            let len = bind.bind_info.length;
            let access = bind.bind_info.mw_access_flags;
            Some(WorkRequest::Bind { window, key: bind.rkey, registration, range: AccessRange { start, len, access } })
        }
        ibv_wr_opcode::IBV_WR_LOCAL_INV => {
            // SAFETY: an invalidation names a key.
            Some(WorkRequest::Invalidate { key: unsafe { entry.__bindgen_anon_1.invalidate_rkey } })
        }
        _ => None,
    }
}

unsafe extern "C" fn post_send(pair: *mut ibv_qp, first: *mut ibv_send_wr, refused: *mut *mut ibv_send_wr) -> c_int {
    let number = number(pair);
    with_status(|fabric| {
        let mut at = first;
        while let Some(entry) = NonNull::new(at) {
            // SAFETY: the caller keeps the chain alive during this call.
            let entry = unsafe { entry.as_ref() };
            // SAFETY: the caller initialised the request as its opcode requires.
            let mut work = unsafe { request(entry) };
            if let Some(WorkRequest::Transfer(transfer)) = &mut work {
                transfer.source = fabric.source_of(number, transfer);
            }
            let is_refused = fabric.injects_refusal("rdma: request refused");
            let pair = fabric.pairs.get_mut(&number);
            let (Some(work), Some(pair), false) = (work, pair, is_refused) else {
                // SAFETY: the caller passes a valid pointer.
                unsafe { *refused = at };
                return EINVAL;
            };
            pair.requests.push_back(PostedRequest { id: entry.wr_id, work, plan: None });
            let in_order = [ibv_qp_state::IBV_QPS_RTS, ibv_qp_state::IBV_QPS_ERR].contains(&pair.state);
            if !in_order || pair.requests.len() > pair.requests_max {
                fabric.violation("a request was posted to a full queue pair, or before it was ready to send");
            }
            at = entry.next;
        }
        fabric.check_owners();
        if let Some(pair) = fabric.pairs.get(&number) {
            pair.wake.notify_one();
        }
        0
    })
}
