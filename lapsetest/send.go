package lapsetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// reserved are the property names that the server keeps for itself.
var reserved = strings.Fields(`
	TRACE_ON MSG_REGION KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET
	MAX_OFFSET BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME UNIQ_KEY
	MAX_RECONSUME_TIMES CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET
	DUP_INFO EXTEND_UNIQ_INFO INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME
	CLUSTER MSG_TYPE INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS
	TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST
	BORN_TIMESTAMP
`)

// SendMessage stores the messages of a request, all or none.
func (s *service) SendMessage(_ context.Context, req *v2.SendMessageRequest) (*v2.SendMessageResponse, error) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	msgs := req.GetMessages()
	if len(msgs) == 0 {
		return &v2.SendMessageResponse{Status: result(v2.Code_MESSAGE_CORRUPTED, "no message to send")}, nil
	}
	for _, m := range msgs {
		if st := b.refuse(m, msgs, now); st != nil {
			return &v2.SendMessageResponse{Status: st}, nil
		}
	}
	// A topic that is not there has the type UNSPECIFIED, which is what the real one
	// complains about; 40402 is the answer of QueryRoute only.
	expected := Unspecified
	t := b.topics[nameOf(msgs[0].GetTopic())]
	if t != nil {
		expected = t.typ
	}
	for _, m := range msgs {
		if actual := typeOf(m); actual != expected {
			return &v2.SendMessageResponse{Status: result(v2.Code_MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
				fmt.Sprintf("TopicMessageType validate failed, the expected type is %s, but actual type is %s", expected, actual))}, nil
		}
	}
	answer := &v2.SendMessageResponse{Status: result(v2.Code_OK, "")}
	for _, pb := range msgs {
		m := fromWire(pb)
		b.store(t, m)
		entry := &v2.SendResultEntry{
			Status:    result(v2.Code_OK, ""),
			MessageId: m.ID,
			Offset:    m.offset,
		}
		if !m.due.IsZero() {
			entry.RecallHandle = recallHandle(m)
		}
		answer.Entries = append(answer.Entries, entry)
	}
	return answer, nil
}

// refuse returns why the proxy would not take m, nil if it would.
func (b *Broker) refuse(m *v2.Message, all []*v2.Message, now time.Time) *v2.Status {
	sys := m.GetSystemProperties()
	if name := nameOf(m.GetTopic()); !topicName.MatchString(name) {
		return result(v2.Code_ILLEGAL_TOPIC, "the specified topic is illegal: "+name)
	}
	if nameOf(m.GetTopic()) != nameOf(all[0].GetTopic()) {
		return result(v2.Code_MESSAGE_CORRUPTED, "topic in message is not same")
	}
	switch n := len(m.GetBody()); {
	case n == 0:
		return result(v2.Code_MESSAGE_BODY_EMPTY, "message body cannot be empty")
	case n > maxBodySize:
		return result(v2.Code_MESSAGE_BODY_TOO_LARGE, "message body cannot exceed the max 4194304")
	}
	if len(m.GetUserProperties()) > maxProperties {
		return result(v2.Code_MESSAGE_PROPERTIES_TOO_LARGE, "too many user properties, max is 128")
	}
	size := len(sys.GetTag())
	for k, v := range m.GetUserProperties() {
		if slices.Contains(reserved, k) {
			return result(v2.Code_ILLEGAL_MESSAGE_PROPERTY_KEY, "property is used by system: "+k)
		}
		if hasControl(k) || hasControl(v) {
			return result(v2.Code_ILLEGAL_MESSAGE_PROPERTY_KEY, "the key or value of a property cannot contain control character")
		}
		size += len(k) + len(v)
	}
	if tag := sys.GetTag(); tag != "" && (strings.TrimSpace(tag) == "" || strings.Contains(tag, "|") || hasControl(tag)) {
		return result(v2.Code_ILLEGAL_MESSAGE_TAG, "the tag is blank, or contains '|' or a control character")
	}
	for _, k := range sys.GetKeys() {
		if k != "" && strings.TrimSpace(k) == "" || hasControl(k) {
			return result(v2.Code_ILLEGAL_MESSAGE_KEY, "the key is blank or contains a control character")
		}
		size += len(k)
	}
	if size > maxPropertySize {
		return result(v2.Code_MESSAGE_PROPERTIES_TOO_LARGE, "the total size of user properties is too large, max is 16384")
	}
	if sys.GetMessageId() == "" {
		return result(v2.Code_ILLEGAL_MESSAGE_ID, "message id is empty")
	}
	if at := sys.GetDeliveryTimestamp(); at != nil {
		if b.opts.maxDelay > 0 && at.AsTime().Sub(now) > b.opts.maxDelay {
			return result(v2.Code_ILLEGAL_DELIVERY_TIME, "the max delay time of message is too large, max is "+b.opts.maxDelay.String())
		}
		if len(all) > 1 {
			return result(v2.Code_INTERNAL_SERVER_ERROR, "timed messages are not supported for batching")
		}
	}
	return nil
}

func hasControl(s string) bool {
	return strings.ContainsFunc(s, unicode.IsControl)
}

// typeOf returns the type that a message's properties make it.
func typeOf(m *v2.Message) TopicType {
	sys := m.GetSystemProperties()
	switch {
	case sys.GetMessageType() == v2.MessageType_TRANSACTION:
		return Transaction
	case sys.GetDeliveryTimestamp() != nil:
		return Delay
	case sys.GetMessageGroup() != "":
		return FIFO
	default:
		return Normal
	}
}

func fromWire(pb *v2.Message) *message {
	sys := pb.GetSystemProperties()
	m := &message{system: sys, Message: Message{
		ID:         sys.GetMessageId(),
		Topic:      nameOf(pb.GetTopic()),
		Body:       pb.GetBody(),
		Tag:        sys.GetTag(),
		Properties: pb.GetUserProperties(),
		// Joined and split by a blank on the way, so that a key with a blank becomes two.
		Keys: strings.Fields(strings.Join(sys.GetKeys(), " ")),
	}}
	if at := sys.GetBornTimestamp(); at != nil {
		m.BornAt = at.AsTime()
	}
	if at := sys.GetDeliveryTimestamp(); at != nil {
		m.DeliverAt = at.AsTime().Truncate(time.Millisecond)
	}
	return m
}

// RecallMessage takes a timed message back, if its time has not come.
func (s *service) RecallMessage(_ context.Context, req *v2.RecallMessageRequest) (*v2.RecallMessageResponse, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	id, code, text := s.b.recall(req.GetRecallHandle())
	return &v2.RecallMessageResponse{Status: result(code, text), MessageId: id}, nil
}
